"""The time that one request has: until its deadline, or until it is cancelled.

Everything that blocks while a request is carried out waits here, so that nothing outlives the action.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from tangram.errors import ActionCancelled, ActionTimedOut

READABLE, WRITABLE = select.POLLIN, select.POLLOUT

_LONGEST_POLL_MS = 2**31 - 1
"""The most that poll(2) takes, some 25 days; an action may name more."""


class Wait:
    """Waits for a socket, `limit_s` seconds in all. Any thread may cancel it; close it at the end, which leaving the context does."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._deadline = time.monotonic() + limit_s
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._cancelled: ActionCancelled | None = None
        self._paused_s: Callable[[], float] = float

    def leave_out(self, paused_s: Callable[[], float]) -> None:
        """Leave out the time for which the environment is paused from now on, of which `paused_s` gives the seconds."""
        before_s = paused_s()
        self._paused_s = lambda: paused_s() - before_s

    def cancel(self, reason: str, cause: str = "cancelled") -> None:
        """Have whoever waits end; the first reason counts."""
        with self._lock:
            self._cancelled = self._cancelled or ActionCancelled(reason, cause)
            if self._wake >= 0:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_write(self._wake, 1)

    def until(self, connection: socket.socket, events: int) -> int:
        """Return which of `events` a socket is ready for, or that it is broken, as poll(2) says it.

        Raises `ActionCancelled` when it was cancelled; `ActionTimedOut` when the time is over.
        """
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        poller.register(connection, events)
        # The time counts even where a socket is always ready: a server may send without end.
        while (left_s := self._deadline + self._paused_s() - time.monotonic()) > 0:
            ready = dict(poller.poll(min(left_s * 1000, _LONGEST_POLL_MS)))
            if self._cancelled is not None:
                raise self._cancelled
            if found := ready.get(connection.fileno()):
                return found
        raise ActionTimedOut(f"the server did not answer within {self._limit_s:g} s", "timeout")

    def close(self) -> None:
        """Give the descriptor back."""
        with self._lock:
            if self._wake >= 0:
                os.close(self._wake)
            self._wake = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
