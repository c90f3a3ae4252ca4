"""The worker's side of the fork server: asks it for supervisors and sockets, and starts it again when it was killed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

from workers.cpu.errors import SessionUnavailable
from workers.cpu.ports.loopback import LOOPBACKS
from workers.cpu.process import tree
from workers.cpu.process.fork_server import ANSWER_BYTES, MADE, SUPERVISOR

STOP_LIMIT_S = 15.0
SOCKETS_LIMIT_S = 10.0
_REASON_BYTES = 1024
_ROOT = Path(__file__).resolve().parents[3]


class ForkClient:
    """Starts supervisors; any thread may ask. The fork server starts with the first request.

    It and the supervisors hold the descriptor `lock` as long as they live, if there is one.
    """

    def __init__(self, lock: int | None = None) -> None:
        self._locks = () if lock is None else (lock,)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._closed = False

    def supervisor(self) -> tuple[socket.socket, int]:
        """Return a connection to a fresh supervisor, which ends when nothing of the session is left, and the supervisor's process id.

        Raises `SessionUnavailable`.
        """
        return self._forked(SUPERVISOR)

    def sockets_inside(self, anchor: tuple[int, ...], supervisor: tree.Identity) -> list[socket.socket]:
        """Return sockets of the network of the session with this anchor and supervisor. Raises `SessionUnavailable`."""
        channel, _ = self._forked(json.dumps({"anchor": anchor, "supervisor": supervisor}).encode())
        with channel:
            channel.settimeout(SOCKETS_LIMIT_S)
            try:
                said, descriptors, _, _ = socket.recv_fds(channel, _REASON_BYTES, len(LOOPBACKS))
            except OSError as error:
                said, descriptors = str(error).encode(), []
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        if said != MADE:
            raise SessionUnavailable(f"the network of a session cannot be entered: {said.decode(errors='replace') or 'it ended at once'}")
        return [socket.socket(fileno=descriptor) for descriptor in descriptors]

    def _forked(self, request: bytes) -> tuple[socket.socket, int]:
        """Return a connection to a process that was forked for a request, and its id. Raises `SessionUnavailable`."""
        with self._lock:
            if self._closed:
                raise SessionUnavailable("the sandbox is closed")
            for _ in range(2):
                found = self._ask(self._channel or self._start(), request)
                if found is not None:
                    return found
                self._stop()
        raise SessionUnavailable("the fork server ends as soon as it starts")

    @staticmethod
    def _ask(channel: socket.socket, request: bytes) -> tuple[socket.socket, int] | None:
        """Return a connection to what was forked and its process id; None where the fork server has ended, or does not answer.

        A fork server that has just been killed still has its socket, so what was sent has arrived only once it is answered.
        """
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                socket.send_fds(channel, [request], [theirs.fileno()])
            if answer := channel.recv(ANSWER_BYTES):
                return mine, int(answer)
        except OSError:  # a timeout is one
            pass
        mine.close()
        return None

    def _start(self) -> socket.socket:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # A bare environment: commands are of the same user and can read /proc/<pid>/environ of a supervisor.
        environment = {"PYTHONPATH": str(_ROOT), "PATH": os.defpath, "LANG": "C.UTF-8"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-s", "-S", "-m", "workers.cpu.process.fork_server", *map(str, self._locks)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=environment,
                cwd="/",
                start_new_session=True,
                pass_fds=self._locks,
            )
        mine.settimeout(STOP_LIMIT_S)
        self._channel = mine
        return mine

    def _stop(self) -> None:
        if self._channel is not None:
            self._channel.close()
        if self._process is not None:
            try:
                self._process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._channel = self._process = None

    def close(self) -> None:
        """End the fork server and, with it, whatever is left below it."""
        with self._lock:
            self._closed = True
            self._stop()
