"""Waits for news of the memory of all environments of a node: one thread, which looks at an environment when the kernel says so.

The kernel has news for each few pages that it drops. So after a look, an environment's news are left alone for as long as its programs
need at least to come near their allowance.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workers.cpu.memory.allowance import Allowance

log = logging.getLogger(__name__)


class Watcher:
    """Checks allowances. `on_wanted` gets the report of an environment that has just been paused; it must not block."""

    def __init__(self) -> None:
        self.on_wanted: Callable[[dict[str, Any]], None] = lambda report: None
        self._poller = select.epoll()
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poller.register(self._wakeup, select.EPOLLIN)
        self._lock = threading.Lock()
        self._watched: dict[int, tuple[Allowance, int]] = {}
        self._silent: dict[Allowance, float] = {}
        """When to listen again to environments that were just looked at."""
        self._asked: set[Allowance] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tangram-memory", daemon=True)
        self._thread.start()

    def watch(self, allowance: Allowance, news: Mapping[int, int]) -> None:
        """Check an environment from now on when there is news: on descriptors, for these events of epoll(7)."""
        with self._lock:
            for descriptor, events in news.items():
                self._watched[descriptor] = (allowance, events | select.EPOLLONESHOT)
                self._poller.register(descriptor, events | select.EPOLLONESHOT)

    def forget(self, allowance: Allowance, news: Mapping[int, int]) -> None:
        """Watch an environment no more."""
        with self._lock:
            for descriptor in news if not self._closed else ():
                if self._watched.pop(descriptor, None) is not None:
                    self._poller.unregister(descriptor)
            self._silent.pop(allowance, None)
            self._asked.discard(allowance)

    def check_soon(self, allowance: Allowance) -> None:
        """Check an environment at once, in the thread."""
        with self._lock:
            if not self._closed:
                self._asked.add(allowance)
                os.eventfd_write(self._wakeup, 1)

    def wanted(self) -> list[dict[str, Any]]:
        """Return the reports of all environments that are paused."""
        with self._lock:
            watched = dict.fromkeys(allowance for allowance, _ in self._watched.values())
        return [report for report in (allowance.wanted() for allowance in watched) if report is not None]

    def _run(self) -> None:
        while not self._closed:
            for descriptor, _ in self._poller.poll(self._patience_s()):
                if descriptor == self._wakeup:
                    os.eventfd_read(self._wakeup)
                    continue
                with self._lock:
                    allowance = self._watched.get(descriptor, (None,))[0]
                if allowance is not None:
                    allowance.hear(descriptor)
                    self._check(allowance)
            with self._lock:
                asked, self._asked = self._asked, set()
            for allowance in asked:
                self._check(allowance)
            self._listen()

    def _patience_s(self) -> float | None:
        with self._lock:
            return max(0.0, min(self._silent.values()) - time.monotonic()) if self._silent else None

    def _check(self, allowance: Allowance) -> None:
        try:
            pause_s = allowance.check()
        except Exception:
            # Whatever is wrong with one environment, the others are to be watched.
            log.exception("the memory of environment %s could not be checked", allowance.environment)
            pause_s = 1.0
        with self._lock:
            self._silent[allowance] = time.monotonic() + pause_s

    def _listen(self) -> None:
        """Listen again to environments whose silence is over."""
        with self._lock:
            now = time.monotonic()
            over = {allowance for allowance, until in self._silent.items() if until <= now}
            for descriptor, (allowance, events) in self._watched.items() if over else ():
                if allowance in over:
                    self._poller.modify(descriptor, events)
            for allowance in over:
                del self._silent[allowance]

    def close(self) -> None:
        """Stop."""
        with self._lock:
            self._closed = True
            os.eventfd_write(self._wakeup, 1)
        self._thread.join()
        self._poller.close()
        os.close(self._wakeup)
