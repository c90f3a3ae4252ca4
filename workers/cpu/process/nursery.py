"""The worker's side of the nursery process: asks it for keepers, restarts it when it was killed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

from workers.cpu.errors import SessionUnavailable
from workers.cpu.process.groups import Groups

FENCE_LIMIT_S = 15.0
_ROOT = Path(__file__).resolve().parents[3]


class Nursery:
    """Starts keepers; any thread may ask. Its process starts with the first request.

    It and the keepers hold the descriptor `lock` as long as they live, if there is one. `groups` are the control groups of sessions.
    """

    def __init__(self, lock: int | None = None, groups: Groups | None = None) -> None:
        self._prefixes = [(groups and groups.pids) or "", (groups and groups.cpu) or ""]
        self._locks = () if lock is None else (lock,)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._closed = False

    def keeper(self) -> socket.socket:
        """Return a connection to a fresh keeper. Raises `SessionUnavailable`."""
        return self._ask(b"keeper")

    def kill_orphans(self) -> None:
        """Return once no process of a keeper that died by force is left.

        Raises:
            SessionUnavailable: the nursery is gone too, or did not manage in `FENCE_LIMIT_S` seconds.

        """
        with self._ask(b"kill_orphans") as answer:
            answer.settimeout(FENCE_LIMIT_S)
            try:
                told = answer.recv(1)
            except (TimeoutError, ConnectionError):
                told = b""
        # A nursery that ends before it is done closes the connection without a word.
        if not told:
            raise SessionUnavailable("processes of a killed session could not be ended")

    def _ask(self, request: bytes) -> socket.socket:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs, self._lock:
                self._send(request, theirs)
        except BaseException:
            mine.close()
            raise
        return mine

    def _send(self, request: bytes, theirs: socket.socket) -> None:
        if self._closed:
            raise SessionUnavailable("the sandbox is closed")
        for _ in range(2):
            if self._channel is None:
                self._start()
            assert self._channel is not None
            try:
                socket.send_fds(self._channel, [request], [theirs.fileno()])
                return
            except (ConnectionError, BrokenPipeError):
                self._stop()
        raise SessionUnavailable("the nursery process ends as soon as it starts")

    def _start(self) -> None:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # A bare environment: /proc/<pid>/environ of a keeper can be read by the commands, which are of the same user.
        environment = {"PYTHONPATH": str(_ROOT), "PATH": os.defpath, "LANG": "C.UTF-8"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-s", "-S", "-m", "workers.cpu.process.keeper", *self._prefixes, *map(str, self._locks)],
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
                self._process.wait(FENCE_LIMIT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._channel = self._process = None

    def close(self) -> None:
        """End the nursery process and, with it, whatever is left below it."""
        with self._lock:
            self._closed = True
            self._stop()
