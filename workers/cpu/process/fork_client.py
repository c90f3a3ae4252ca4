"""The worker's side of the fork server: asks it for supervisors, and starts it again when it was killed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

from workers.cpu.errors import SessionUnavailable

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
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs, self._lock:
                self._send(theirs)
        except BaseException:
            mine.close()
            raise
        return mine

    def _send(self, theirs: socket.socket) -> None:
        if self._closed:
            raise SessionUnavailable("the sandbox is closed")
        for _ in range(2):
            if self._channel is None:
                self._start()
            assert self._channel is not None
            try:
                socket.send_fds(self._channel, [b"supervisor"], [theirs.fileno()])
                return
            except (ConnectionError, BrokenPipeError):
                self._stop()
        raise SessionUnavailable("the fork server ends as soon as it starts")

    def _start(self) -> None:
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
        self._channel = mine

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
