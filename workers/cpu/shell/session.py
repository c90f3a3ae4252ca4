"""A persistent shell session: which execution uses it, and a shell that is ready for it.

| state     | meaning                                             | next                                  |
|-----------|-----------------------------------------------------|---------------------------------------|
| unstarted | no backend yet                                      | first command: starting               |
| starting  | backend and shell are asked for, bounded in time    | ready: idle; else dead                |
| idle      | the shell waits on its FIFO                         | a command: busy                       |
| busy      | the first execution in the queue uses the shell     | reported: idle; shell ended: dead     |
| dead      | the shell has ended; the backend holds what is left | next command: starting, state restored |
| closed    | the environment is closed                           |                                       |

A shell that starts again finds the folder, the exported variables and the functions of the last report; unexported
variables and shell options are lost with the shell. Only the first execution in the queue may use `shell`.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import threading
import time
from collections import deque

from workers.cpu.errors import MemoryFull, NotReady, ProcessesLeft, SessionUnavailable
from workers.cpu.ports.network import Network
from workers.cpu.shell.backend import Backend, Exited, HungUp, Refused, Spawned
from workers.cpu.shell.dialect import overwrite_file
from workers.cpu.shell.left_run import LeftRun, Shell
from workers.cpu.shell.output import StreamFifo
from workers.cpu.shell.record import SessionRecord
from workers.cpu.shell.run_memory import RunMemory
from workers.cpu.shell.run_types import waits_in
from workers.cpu.shell.session_setup import SessionSetup

CLOSE_LIMIT_S, ROOM_CHECK_MS = 15.0, 20
SAVE_LIMIT_S, SAVE_PAUSE_S = 5.0, 0.002


class QueueEntry:
    """One execution in the queue of a session, of an action; `abandon` takes it out."""

    def __init__(self, action: str = "") -> None:
        self.action, self.abandoned = action, False


class Session:
    """One named session of an environment."""

    def __init__(self, setup: SessionSetup, name: str, known: SessionRecord | None = None) -> None:
        """Make one that is unstarted; `known` is what the worker before this one has left of it."""
        self.setup, self._name = setup, name
        self.control = setup.control(known.control if known is not None else "")
        self._changed = threading.Condition()
        self._queue: deque[QueueEntry] = deque()
        self._backend: Backend | None = None
        self._shell: Shell | None = None
        self._cwd = known.cwd if known is not None else setup.home
        self._streams: tuple[StreamFifo, StreamFifo] | None = None
        self._memory: RunMemory | None = None
        self._left: LeftRun | None = None
        self.closed = False

    # -- the queue -----------------------------------------------------------------------------------------------

    def take(self, entry: QueueEntry) -> bool:
        """Wait until `entry` is the first; return False when it was abandoned or the session closed. Pair with `release`.

        A command that the worker before this one has left comes before all others.
        """
        with self._changed:
            if self._left is not None and self._left.action == entry.action:
                self._queue.appendleft(entry)
                return not self.closed  # It runs, also where it was abandoned, and so is to be ended.
            self._queue.append(entry)
            self._changed.wait_for(lambda: self.closed or entry.abandoned or (self._queue[0] is entry and self._left is None))
            return not self.closed and not entry.abandoned

    def printed_by(self, action: str) -> int | None:
        """Return how much the command of this action has printed, if the worker before this one has left it; else None."""
        left = self._left
        return sum(each.size for each in self.memory.printed) if left is not None and left.action == action else None

    def take_left(self, action: str) -> LeftRun | None:
        """Return the command of this action, if the worker before this one has left it and nobody has taken it yet; else None."""
        with self._changed:
            left = self._left
            if left is None or left.action != action:
                return None
            self._left = None
            self._changed.notify_all()
            return left

    def release(self, entry: QueueEntry) -> None:
        """Let the next one use the session."""
        with self._changed:
            self._queue.remove(entry)
            self._changed.notify_all()

    @property
    def loss(self) -> str:
        """Why the environment has ended by itself; nothing while it stands, or where it was closed."""
        return self.setup.backends.loss()

    @property
    def loss_cause(self) -> str:
        """The cause of its loss (`tangram/ends.py`)."""
        return self.setup.backends.loss_cause()

    @property
    def is_taken(self) -> bool:
        """Whether somebody uses it, or waits to."""
        return bool(self._queue) or self._left is not None

    @property
    def runs_something(self) -> bool:
        """Whether somebody uses it, or what earlier commands have started runs on."""
        backend = self._backend
        return self.is_taken or (backend is not None and backend.runs_something())

    def network(self) -> Network | None:
        """Return the network in which servers of the session listen; None where nothing was started in it."""
        with self._changed:
            return self._backend.network() if self._backend is not None else None

    def abandon(self, entry: QueueEntry) -> None:
        """Make a waiting `entry` give up."""
        with self._changed:
            entry.abandoned = True
            self._changed.notify_all()

    # -- the shell -----------------------------------------------------------------------------------------------

    @property
    def streams(self) -> tuple[StreamFifo, StreamFifo]:
        """Return the FIFOs for standard output and standard error."""
        assert self._streams is not None
        return self._streams

    @property
    def memory(self) -> RunMemory:
        """Return the memory of its commands."""
        assert self._memory is not None
        return self._memory

    def ready_shell(self, wake: int, limit_s: float) -> Shell:
        """Return a shell that waits for a command, started if need be; the descriptor `wake` interrupts the start.

        Raises `MemoryFull` when the kernel ended it, since the memory of the environment was full; `NotReady` when it ended, or did not
        come up within `limit_s`, and all that the session held has ended, too; `SessionUnavailable` when there is none, its start was
        interrupted, or the session is closed.
        """
        self._notice_end()
        if self._shell is None:
            self._shell = self._start(wake, min(limit_s, self.setup.start_timeout_s))
        return self._shell

    def _notice_end(self) -> None:
        """Take note of a shell or backend that ended between two commands."""
        if self._backend is None:
            return
        for event in self._backend.events():
            match event:
                case Exited(shell=pid) if self._shell is not None and pid == self._shell.pid:
                    self._shell = None
                case HungUp():
                    self.lose_backend()

    def _start(self, wake: int, limit_s: float) -> Shell:
        before = self._backend
        if self._streams is None:
            self.control.make()
            self._make_streams()
            before = None
        self._note()
        backend, ended_before = self._connected(), self.setup.backends.oom_kills()
        if backend is not before:
            self.keep()
        done = _opened(self.control.done, os.O_RDWR)
        try:
            self._await_room(wake)
            os.read(done, waits_in(done))  # what a shell before this one has reported, and nobody has read
            with self.setup.backends.awake():
                backend.spawn(self.control, self._cwd)
            return self._await_shell(backend, done, wake, limit_s)
        except SessionUnavailable as error:
            is_full = self.setup.backends.oom_kills() > ended_before
            self._end_all(backend)
            if is_full:
                raise MemoryFull("the environment's memory was full: the kernel has ended its shell while it started") from error
            raise
        finally:
            os.close(done)

    def _await_room(self, wake: int) -> None:
        """Wait while the environment is paused: what runs there would take the memory that the shell needs."""
        poller = select.poll()
        poller.register(wake, select.POLLIN)
        while self.setup.backends.is_paused and not self.closed:
            if poller.poll(ROOM_CHECK_MS):
                raise SessionUnavailable("the start of the shell was interrupted")

    def _make_streams(self) -> None:
        self._streams = (StreamFifo(self.control.folder, "out"), StreamFifo(self.control.folder, "err"))
        self._memory = RunMemory()

    def keep(self) -> None:
        """Have a command that runs outlive this worker: its streams, its report, and its memory. Raises `OSError`."""
        if self.setup.backends.keeps and self._streams is not None:
            out, err = self._streams
            opened = {"done": _opened(self.control.done, os.O_RDWR), "out": _opened(out.path), "err": _opened(err.path)}
            self.setup.backends.keep(self.control.name, {**opened, **self.memory.descriptors})
            for descriptor in opened.values():
                os.close(descriptor)

    def renew(self, fifo: StreamFifo) -> None:
        """Replace a FIFO for the next command, as a process that was left running still writes to it. Raises `OSError`."""
        fifo.renew()
        if self.setup.backends.keeps:
            descriptor = _opened(fifo.path)
            self.setup.backends.keep(self.control.name, {fifo.name: descriptor})
            os.close(descriptor)

    def _note(self) -> None:
        """Tell a successor of this worker where the session is."""
        if not self.closed:
            self.setup.record.note(self._name, SessionRecord(self.control.name, self._cwd))

    def resume(self, backend: Backend | None, shell: int, memory: RunMemory | None, left: LeftRun | None) -> None:
        """Go on with what the worker before this one has left: a backend, its shell by process id (0 for none), and a command.

        Raises `OSError` where the FIFOs are not there any more.
        """
        self._left = left
        if backend is None:
            # The next shell begins afresh, with the state that was saved.
            shutil.rmtree(self.control.folder, ignore_errors=True)
            self._memory = memory
            return
        if memory is None:
            self.control.remove("out.", "err.")
            self._make_streams()
            self.keep()
        else:
            self._streams = (StreamFifo(self.control.folder, "out", left=True), StreamFifo(self.control.folder, "err", left=True))
            self._memory = memory
        self._backend, self._shell = backend, Shell(backend, shell) if shell else None

    def _connected(self) -> Backend:
        if self._backend is None:
            backend = self.setup.backends.backend(self.control)
            with self._changed:
                if self.closed:
                    backend.close()
                    raise SessionUnavailable("the environment is closed")
                self._backend = backend
        return self._backend

    def _await_shell(self, backend: Backend, done: int, wake: int, limit_s: float) -> Shell:
        deadline, paused_before_s = time.monotonic() + limit_s, self.setup.backends.paused_s()
        poller = select.poll()
        for descriptor in (done, wake, backend.fileno()):
            poller.register(descriptor, select.POLLIN)
        shell: Shell | None = None
        reported = False
        while shell is None or not reported:
            left_s = deadline + self.setup.backends.paused_s() - paused_before_s - time.monotonic()
            if left_s <= 0:
                raise NotReady(f"the shell was not ready within {limit_s:g} s")
            ready = {descriptor for descriptor, _ in poller.poll(left_s * 1000)}
            if wake in ready:
                raise SessionUnavailable("the start of the shell was interrupted")
            if done in ready:
                reported = os.read(done, 4096).startswith(b"ready ")
            for event in backend.events():
                match event:
                    case Spawned(pid):
                        shell = Shell(backend, pid)
                    case Refused(reason):
                        raise SessionUnavailable(reason)
                    case Exited(shell=pid, code=code) if shell is not None and pid == shell.pid:
                        raise NotReady(f"the shell ended with code {code} while it started")
                    case HungUp():
                        raise SessionUnavailable("what holds the session ended while it started a shell")
        return shell

    def _end_all(self, backend: Backend) -> None:
        """End a backend and all processes that it holds, such as a shell that did not come up."""
        with self.setup.backends.awake():
            backend.hang_up()
            if _has_ended(backend):
                self.lose_backend()

    def reset(self) -> None:
        """End everything and forget the protocol's files, which somebody has damaged; the next command starts afresh."""
        if self._backend is not None:
            self._end_all(self._backend)
        shutil.rmtree(self.control.folder, ignore_errors=True)
        self._streams = None
        self._forget_memory()

    def _forget_memory(self) -> None:
        if self._memory is not None:
            self._memory.close()

    def remember_folder(self) -> None:
        """Note where the shell is, for a successor."""
        if self._shell is not None:
            self._cwd = self._shell.backend.folder() or self._cwd

    def await_saving(self) -> None:
        """Return once the shell has saved what the last command left; one that has ended, or is stuck, is not waited for."""
        deadline = time.monotonic() + SAVE_LIMIT_S
        while self._shell is not None and not self.control.awaits_run() and time.monotonic() < deadline:
            if self._shell.backend.folder() is None:
                return
            time.sleep(SAVE_PAUSE_S)

    def lose_shell(self) -> None:
        """Take note that the shell has ended; its backend goes on."""
        self._shell = None
        self._note()

    def lose_backend(self) -> None:
        """Take note that the backend is gone, and everything that it held."""
        self._shell = None
        with self._changed:
            backend, self._backend = self._backend, None
            if self.closed:
                self._backend = backend  # `close` still watches it
                return
        if backend is not None:
            backend.close()
        self._note()

    def sweep_if_free(self) -> None:
        """End every process of the session unless a command is running or waits."""
        entry = QueueEntry()
        with self._changed:
            if self.closed or self.is_taken:
                return
            self._queue.append(entry)
        try:
            self.sweep()
        finally:
            self.release(entry)

    def sweep(self) -> None:
        """End every process of a session that nobody uses; the next command finds what it exported and where it was.

        Raises `SessionUnavailable` when some did not end.
        """
        self.await_saving()
        self.remember_folder()
        if self._backend is not None:
            self._end_all(self._backend)
        if self._backend is not None:
            raise SessionUnavailable("what earlier commands left running could not be ended")

    def forget_state(self) -> None:
        """Have the next shell begin without the variables and functions of earlier commands, in the folder where they were.

        Raises `SessionUnavailable` when somebody has put something else in the place of the saved state.
        """
        try:
            overwrite_file(self.control.state, b"")
        except FileNotFoundError:
            return
        except OSError as error:
            raise SessionUnavailable(f"the saved state cannot be forgotten: {error}") from error

    # -- the end -------------------------------------------------------------------------------------------------

    def hang_up(self) -> None:
        """Begin to close: wake who waits, and tell the backend to end everything."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()
            if self._backend is not None:
                self._backend.hang_up()

    def close(self) -> None:
        """End all processes of the session; its files stay, see `remove_files`.

        Raises `ProcessesLeft` when some did not end within `CLOSE_LIMIT_S` seconds, nor in as many more after what held them was ended by
        force.
        """
        with self.setup.backends.awake():
            if not self.closed:
                self.hang_up()
            backend = self._backend
            ended = backend is None or _has_ended(backend)
            with self._changed:
                ended = self._changed.wait_for(lambda: not self._queue, CLOSE_LIMIT_S) and ended
        with self._changed:
            if not ended:
                raise ProcessesLeft("a session's processes could not be ended")
            self._backend = None
        if backend is not None:
            backend.close()
        self._forget_memory()

    def remove_files(self) -> None:
        """Remove what the protocol has left of a session that has ended."""
        shutil.rmtree(self.control.folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.unlink(self.control.state)


def _opened(path: str, how: int = os.O_RDONLY) -> int:
    return os.open(path, how | os.O_NONBLOCK | os.O_CLOEXEC)


def _has_ended(backend: Backend) -> bool:
    """Wait until nothing is left of what was told to end. A backend that does not answer in time is ended by force."""
    if backend.has_ended(CLOSE_LIMIT_S):
        return True
    return backend.abandon() and backend.has_ended(CLOSE_LIMIT_S)
