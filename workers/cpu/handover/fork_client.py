"""The worker's side of the fork server: asks it for supervisors and sockets, and starts it again when it was killed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from app.local.kept_environments import END
from workers.cpu.errors import SessionUnavailable
from workers.cpu.handover.fork_server import MADE
from workers.cpu.handover.protocol import Kept, listen
from workers.cpu.home_core import go_anywhere
from workers.cpu.ports.loopback import LOOPBACKS
from workers.cpu.process import tree

STOP_LIMIT_S, ANSWER_LIMIT_S = 15.0, 60.0
SOCKETS_LIMIT_S = 10.0
ANSWER_BYTES = _REASON_BYTES = 1024
PYTHON = (sys.executable, "-s", "-S", "-m")
"""What runs a module of this project that needs the standard library alone."""
ENVIRONMENT = {"PYTHONPATH": str(Path(__file__).resolve().parents[3]), "PATH": os.defpath, "LANG": "C.UTF-8"}
"""A bare one: commands are of the same user and can read /proc/<pid>/environ of a supervisor."""


class AdoptedProcess:
    """A fork server that the worker before this one has started, with what is needed of a child process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._process = tree.read_process(pid)

    def poll(self) -> int | None:
        """Return None while it lives."""
        now = tree.read_process(self.pid)
        lives = self._process is not None and now is not None and now.identity == self._process.identity and not now.is_dying
        return None if lives else 0

    def wait(self, timeout: float) -> None:
        """Wait until it has ended. Raises `TimeoutExpired`."""
        if self._process is not None:
            tree.await_end(self._process, timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("fork_server", timeout)

    def kill(self) -> None:
        """Kill it."""
        if self._process is not None:
            tree.send(self._process, signal.SIGKILL)


class ForkClient:
    """Starts supervisors; any thread may ask. The fork server starts with the first request, unless there is one of `adopted`.

    It and the supervisors hold the descriptor `lock` as long as they live, if there is one. Environments that are paused go on before it
    ends, so that they can end: their freezers begin with `freezer`. In the folder `base` it waits `keep_s` seconds
    for a successor of a worker that has died. `on_restart` is called when it was killed and another has been started.
    Where there is `start_keeper`, the fork server is a keeper (`keeper.py`), which that starts.
    """

    def __init__(
        self,
        lock: int | None = None,
        base: Path | None = None,
        keep_s: float = 0.0,
        adopted: Kept | None = None,
        on_restart: Callable[[], None] = lambda: None,
        freezer: str | None = None,
        start_keeper: Callable[[], Kept] | None = None,
    ) -> None:
        self._freezer, self._start_keeper = freezer, start_keeper
        self._guard, self._base, self._keep_s, self._on_restart = lock, base, keep_s, on_restart
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | AdoptedProcess | None = AdoptedProcess(adopted.server) if adopted is not None else None
        self._channel: socket.socket | None = adopted.channel if adopted is not None else None
        self._closed = self._was_killed = False

    def supervisor(self, anchor: Sequence[int], groups: Sequence[str], of: str = "", control: str = "") -> tuple[socket.socket, int]:
        """Return a connection to a fresh supervisor, inside of `anchor` if any, and its process id.

        It is for the session of the environment `of` with the protocol folder `control`.

        The connection ends when nothing of the session is left and its control groups, called `groups` and that id, are removed.
        Raises `SessionUnavailable`.
        """
        return self._forked({"supervisor": anchor, "groups": groups, "of": of, "control": control})

    def anchor(self, asked: Mapping[str, object]) -> tuple[socket.socket, int]:
        """Return a connection to a fresh anchor, over which it says how it fares, and its first process. Raises `SessionUnavailable`."""
        return self._forked(asked)

    def sockets_inside(self, anchor: Sequence[int]) -> list[socket.socket]:
        """Return sockets of the network of the environment with this anchor. Raises `SessionUnavailable`."""
        channel, _ = self._forked({"sockets": anchor})
        with channel:
            channel.settimeout(SOCKETS_LIMIT_S)
            try:
                said, descriptors, _, _ = socket.recv_fds(channel, _REASON_BYTES, len(LOOPBACKS))
            except OSError as error:
                said, descriptors = str(error).encode(), []
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        if said != MADE:
            reason = said.decode(errors="replace") or "it ended at once"
            raise SessionUnavailable(f"the network of an environment cannot be entered: {reason}")
        return [socket.socket(fileno=descriptor) for descriptor in descriptors]

    def start(self) -> None:
        """Start the fork server now, not with the first request, unless it lives. Raises what `start_keeper` does."""
        with self._lock:
            self._living()

    @property
    def keeps(self) -> bool:
        """Whether sessions wait for a successor of a worker that has died."""
        return self._base is not None and self._keep_s > 0

    def keep(
        self,
        environment: str,
        control: str,
        descriptors: Mapping[str, int],
        *,
        in_container: bool = False,
        thawing: tuple[str, str] | None = None,
    ) -> None:
        """Have descriptors of a session kept open for a successor, by name; see `protocol.py`.

        What is `in_container` is kept until there are no descriptors of it. Nothing else need be here for that. It may be paused when it is
        to end, and what is frozen cannot end: `thawing` is the file and the value that let it go on.
        Raises `SessionUnavailable` where the fork server cannot be started.
        """
        asked = {"keep": environment, "control": control, "names": list(descriptors), "in_container": in_container, "thawing": thawing}
        with self._lock, contextlib.suppress(OSError):
            channel = self._living() if in_container and descriptors and self.keeps else self._channel
            if channel is not None:
                socket.send_fds(channel, [json.dumps(asked).encode()], list(descriptors.values()))

    def _forked(self, asked: Mapping[str, object]) -> tuple[socket.socket, int]:
        """Return a connection to a process that was forked for a request, and its id. Raises `SessionUnavailable`."""
        request = json.dumps(asked).encode()
        for _ in range(2):
            mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            mine.settimeout(ANSWER_LIMIT_S)
            try:
                with theirs, self._lock:
                    socket.send_fds(self._living(), [request], [theirs.fileno(), mine.fileno()])
                # What was sent to a fork server that has just been killed has arrived only once it is answered.
                pid, _, reason = mine.recv(ANSWER_BYTES).decode().partition(" ")
            except OSError as error:
                pid, reason = "", f"the fork server does not answer: {error.strerror or error}"
            if pid.isdigit() and int(pid):
                return mine, int(pid)
            close(mine)
            if pid or self._lives():
                break
        raise SessionUnavailable(reason or "the fork server ends as soon as it starts, or has no descriptor for one more session")

    def _lives(self) -> bool:
        with self._lock:
            return self._process is not None and self._process.poll() is None

    def _living(self) -> socket.socket:
        """Return the connection to the fork server, which is started where it does not live. The caller holds the lock."""
        if self._closed:
            raise SessionUnavailable("the sandbox is closed")
        if self._process is not None and self._process.poll() is not None:
            self._was_killed = True
            self._stop()
        channel = self._channel or self._start()
        if self._was_killed:
            self._was_killed = False
            self._on_restart()
        return channel

    def _start(self) -> socket.socket:
        return self._start_here() if self._start_keeper is None else self._connect_to(self._start_keeper)

    def _connect_to(self, start_keeper: Callable[[], Kept]) -> socket.socket:
        """Start a keeper and connect to it. The keeper takes the lock, and hands it over."""
        assert self._guard is not None
        fcntl.flock(self._guard, fcntl.LOCK_UN)
        try:
            kept = start_keeper()
        except BaseException:
            fcntl.flock(self._guard, fcntl.LOCK_EX)
            raise
        os.dup2(kept.lock, self._guard, inheritable=False)
        os.close(kept.lock)
        self._process, self._channel = AdoptedProcess(kept.server), kept.channel
        return kept.channel

    def _start_here(self) -> socket.socket:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, contextlib.ExitStack() as listening:
            passed = [-1, -1 if self._guard is None else self._guard]
            if self._base is not None and self.keeps:
                passed[0] = listening.enter_context(listen(self._base)).fileno()
            go_anywhere()
            libraries = os.environ.get("LD_LIBRARY_PATH")  # a Python of a cluster's `module load` may not start without
            self._process = subprocess.Popen(
                [*PYTHON, "workers.cpu.handover.fork_server", str(self._keep_s), *map(str, passed), self._freezer or ""],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=ENVIRONMENT if libraries is None else {**ENVIRONMENT, "LD_LIBRARY_PATH": libraries},
                cwd="/",
                start_new_session=True,
                pass_fds=[descriptor for descriptor in passed if descriptor >= 0],
            )
        self._channel = mine
        return mine

    def _stop(self) -> None:
        if self._channel is not None:
            with contextlib.suppress(OSError):
                self._channel.send(END)
            self._channel.close()
        if self._process is not None:
            try:
                self._process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(STOP_LIMIT_S)
        self._channel = self._process = None

    def close(self) -> None:
        """End the fork server and, with it, whatever is left below it."""
        with self._lock:
            self._closed = True
            self._stop()


def close(channel: socket.socket) -> None:
    """Close a connection to what was forked, also for the copy of it that the fork server has."""
    with contextlib.suppress(OSError):
        channel.shutdown(socket.SHUT_RDWR)
    channel.close()
