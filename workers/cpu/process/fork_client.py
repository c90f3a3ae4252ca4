"""The worker's side of the fork server: asks it for supervisors, and starts it again when it was killed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

from workers.cpu.errors import SessionUnavailable
from workers.cpu.process.fork_server import FORKED

STOP_LIMIT_S = 15.0
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

    def supervisor(self) -> socket.socket:
        """Return a connection to a fresh supervisor, which ends when nothing of the session is left. Raises `SessionUnavailable`."""
        with self._lock:
            if self._closed:
                raise SessionUnavailable("the sandbox is closed")
            for _ in range(2):
                found = self._ask(self._channel or self._start())
                if found is not None:
                    return found
                self._stop()
        raise SessionUnavailable("the fork server ends as soon as it starts")

    @staticmethod
    def _ask(channel: socket.socket) -> socket.socket | None:
        """Return a connection to a fresh supervisor; None where the fork server has ended, or does not answer.

        A fork server that has just been killed still has its socket, so what was sent has arrived only once it is answered.
        """
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                socket.send_fds(channel, [b"supervisor"], [theirs.fileno()])
            if channel.recv(len(FORKED)):
                return mine
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
