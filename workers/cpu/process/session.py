"""A persistent shell session: whose turn it is, and a shell that is ready for it.

| state     | meaning                                             | next                                  |
|-----------|-----------------------------------------------------|---------------------------------------|
| unstarted | no keeper yet                                       | first command: starting               |
| starting  | keeper and shell are asked for, bounded in time     | ready: idle; else dead                |
| idle      | the shell waits on its FIFO                         | a command: busy                       |
| busy      | one execution has the turn                          | reported: idle; shell ended: dead     |
| dead      | the shell has ended; the keeper holds what is left  | next command: starting, state restored |
| closed    | the environment is closed                           |                                       |

A shell that starts again finds the folder, the exported variables and the functions of the last report; unexported
variables and shell options are lost with the shell. Only the execution that has the turn may use `shell`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import shutil
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from workers.cpu.errors import ProcessesLeft, SessionUnavailable
from workers.cpu.process.dialect import Control, Dialect
from workers.cpu.process.link import Exited, HungUp, KeeperLink, Refused, Spawned
from workers.cpu.process.nursery import Nursery
from workers.cpu.process.output import Drain, StreamFifo

CLOSE_LIMIT_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSetup:
    """What a session is made of; the same for all sessions of an environment."""

    nursery: Nursery
    drain: Drain
    dialect: Dialect
    control_folder: Path
    home: Path
    variables: Mapping[str, str]
    limits: Mapping[str, int]
    start_timeout_s: float


@dataclass(slots=True)
class Shell:
    """A living shell: its process ids and its keeper."""

    link: KeeperLink
    pid: int
    keeper: int


class Turn:
    """One execution's wish to use a session; `abandon` makes it give up waiting."""

    def __init__(self) -> None:
        self.abandoned = False


class Session:
    """One named session of an environment."""

    def __init__(self, setup: SessionSetup) -> None:
        self.setup = setup
        self.control = Control(setup.control_folder / secrets.token_hex(8))
        self._turns = threading.Condition()
        self._queue: deque[Turn] = deque()
        self._link: KeeperLink | None = None
        self._shell: Shell | None = None
        self._cwd = str(setup.home)
        self._streams: tuple[StreamFifo, StreamFifo] | None = None
        self.closed = False

    # -- turns ---------------------------------------------------------------------------------------------------

    def take(self, turn: Turn) -> bool:
        """Wait for `turn`; return False when it was abandoned or the session closed. Pair with `release`."""
        with self._turns:
            self._queue.append(turn)
            self._turns.wait_for(lambda: self.closed or turn.abandoned or self._queue[0] is turn)
            return not self.closed and not turn.abandoned

    def release(self, turn: Turn) -> None:
        """Let the next one have its turn."""
        with self._turns:
            self._queue.remove(turn)
            self._turns.notify_all()

    def abandon(self, turn: Turn) -> None:
        """Make a waiting `turn` give up."""
        with self._turns:
            turn.abandoned = True
            self._turns.notify_all()

    # -- the shell -----------------------------------------------------------------------------------------------

    @property
    def streams(self) -> tuple[StreamFifo, StreamFifo]:
        """Return the FIFOs for standard output and standard error."""
        assert self._streams is not None
        return self._streams

    def ready_shell(self, wake: int) -> Shell:
        """Return a shell that waits for a command, started if need be; the descriptor `wake` interrupts the start.

        Raises:
            SessionUnavailable: it did not come up in time, was interrupted, or the session is closed.

        """
        self._notice_end()
        if self._shell is None:
            try:
                self._shell = self._start(wake)
            except SessionUnavailable:
                if not os.path.exists(self.control.state):
                    raise
                # The saved state itself may be what a shell cannot start with.
                os.unlink(self.control.state)
                self._shell = self._start(wake)
        return self._shell

    def _notice_end(self) -> None:
        """Take note of a shell or keeper that ended between two commands."""
        if self._link is None:
            return
        for event in self._link.events():
            match event:
                case Exited(shell=pid) if self._shell is not None and pid == self._shell.pid:
                    self._shell = None
                case HungUp():
                    self.lose_keeper()

    def _start(self, wake: int) -> Shell:
        if self._streams is None:
            self.control.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.mkfifo(self.control.go, 0o600)
            os.mkfifo(self.control.done, 0o600)
            self._streams = (StreamFifo(self.control.folder, "out"), StreamFifo(self.control.folder, "err"))
        link = self._connected()
        done = os.open(self.control.done, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            setup = self.setup
            link.spawn(setup.dialect.argv(self.control), setup.variables, (self._cwd, str(setup.home)), setup.limits)
            return self._await_shell(link, done, wake)
        except SessionUnavailable:
            self._end_all(link)
            raise
        finally:
            os.close(done)

    def _connected(self) -> KeeperLink:
        if self._link is None:
            link = KeeperLink(self.setup.nursery.keeper())
            with self._turns:
                if self.closed:
                    link.close()
                    raise SessionUnavailable("the environment is closed")
                self._link = link
        return self._link

    def _await_shell(self, link: KeeperLink, done: int, wake: int) -> Shell:
        deadline = time.monotonic() + self.setup.start_timeout_s
        poller = select.poll()
        for descriptor in (done, wake, link.fileno()):
            poller.register(descriptor, select.POLLIN)
        shell: Shell | None = None
        reported = False
        while shell is None or not reported:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise SessionUnavailable(f"the shell was not ready within {self.setup.start_timeout_s:g} s")
            ready = {descriptor for descriptor, _ in poller.poll(left_s * 1000)}
            if wake in ready:
                raise SessionUnavailable("the start of the shell was interrupted")
            if done in ready:
                reported = os.read(done, 4096).startswith(b"ready ")
            for event in link.events():
                match event:
                    case Spawned(pid, keeper):
                        shell = Shell(link, pid, keeper)
                    case Refused(reason):
                        raise SessionUnavailable(reason)
                    case Exited(code=code):
                        raise SessionUnavailable(f"the shell ended with code {code} while it started")
                    case HungUp():
                        raise SessionUnavailable("the session's keeper ended while it started a shell")
        return shell

    def _end_all(self, link: KeeperLink) -> None:
        """End a shell that did not come up, by ending its keeper and all below it."""
        link.hang_up()
        if link.has_ended(CLOSE_LIMIT_S):
            self.lose_keeper()

    def reset(self) -> None:
        """End everything and forget the protocol's files, which somebody has damaged; the next command starts afresh."""
        if self._link is not None:
            self._end_all(self._link)
        shutil.rmtree(self.control.folder, ignore_errors=True)
        self._streams = None

    def remember_folder(self) -> None:
        """Note where the shell is, for a successor."""
        if self._shell is not None:
            with contextlib.suppress(OSError):
                self._cwd = os.readlink(f"/proc/{self._shell.pid}/cwd")

    def lose_shell(self) -> None:
        """Take note that the shell has ended; its keeper goes on."""
        self._shell = None

    def lose_keeper(self) -> None:
        """Take note that the keeper is gone, and return once nothing of it is left."""
        self._shell = None
        with self._turns:
            link, self._link = self._link, None
            if self.closed:
                self._link = link  # `close` still watches it
                return
        if link is not None:
            link.close()
        self.setup.nursery.fence()

    # -- the end -------------------------------------------------------------------------------------------------

    def hang_up(self) -> None:
        """Begin to close: wake who waits, and tell the keeper to end everything."""
        with self._turns:
            self.closed = True
            self._turns.notify_all()
            if self._link is not None:
                self._link.hang_up()

    def close(self) -> None:
        """End all processes of the session and remove its control folder.

        Raises:
            ProcessesLeft: some did not end within `CLOSE_LIMIT_S` seconds.

        """
        self.hang_up()
        link = self._link
        ended = link is None or link.has_ended(CLOSE_LIMIT_S)
        with self._turns:
            ended = self._turns.wait_for(lambda: not self._queue, CLOSE_LIMIT_S) and ended
            self._link = None
        if not ended:
            raise ProcessesLeft("a session's processes could not be ended")
        if link is not None:
            link.close()
        shutil.rmtree(self.control.folder, ignore_errors=True)
