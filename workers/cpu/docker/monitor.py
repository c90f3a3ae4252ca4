"""Watches the containers of environments: that they stand, and what they write.

One thread. The end of a container is reported at once. What a container has written is measured often while its environment is
busy, else seldom. A command exceeds the limit by what it writes between two measurements. Measuring takes a tenth of the
thread's time at most, so where there are many files it is done less often.

Where a command runs, its meter ends that once the container has written too much. Where none runs, this module ends the container. It
does so in another thread, since an engine may take long to answer.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from workers.cpu.docker.container import Container

IDLE_CHECK_S = 10.0
MOST_OF_TIME = 0.1

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Watched:
    container: Container
    is_busy: Callable[[], bool]
    on_end: Callable[[], None]
    checked_at: float = 0.0
    ending: threading.Thread | None = None


class ContainerMonitor:
    """Calls `on_end` for containers that have ended, and measures every `check_s` seconds what busy ones have written."""

    def __init__(self, check_s: float) -> None:
        self._check_s = check_s
        self._poller = select.epoll()
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poller.register(self._wakeup, select.EPOLLIN)
        self._lock = threading.Lock()
        self._watched: dict[int, _Watched] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tangram-monitor", daemon=True)
        self._thread.start()

    def add(self, container: Container, is_busy: Callable[[], bool], on_end: Callable[[], None]) -> None:
        """Watch a container from now on."""
        with self._lock:
            self._watched[container.ended] = _Watched(container, is_busy, on_end)
        self._poller.register(container.ended, select.EPOLLIN)

    def forget(self, container: Container) -> None:
        """Watch it no more; nothing where it is not watched."""
        with self._lock:
            if self._watched.pop(container.ended, None) is not None:
                self._poller.unregister(container.ended)

    def _run(self) -> None:
        check_at = time.monotonic() + self._check_s
        while not self._closed:
            for descriptor, _ in self._poller.poll(max(0.0, check_at - time.monotonic())):
                self._note_end(descriptor)
            began = time.monotonic()
            if began >= check_at:
                self._measure(began)
                took_s = time.monotonic() - began
                check_at = began + max(self._check_s, took_s / MOST_OF_TIME)

    def _note_end(self, descriptor: int) -> None:
        with self._lock:
            watched = self._watched.get(descriptor)
            # Between the poll and now the number may have become another container's, which stands.
            if watched is None or not watched.container.has_ended():
                return
            del self._watched[descriptor]
            self._poller.unregister(descriptor)
        try:
            watched.on_end()
        except Exception:
            log.exception("the end of container %s could not be dealt with", watched.container.id[:12])

    def _measure(self, now: float) -> None:
        """Note what containers have written. End those that have written too much and in which no command runs."""
        with self._lock:
            known = list(self._watched.values())
        for watched in known:
            is_busy = watched.is_busy()
            if self._closed or (not is_busy and now - watched.checked_at < IDLE_CHECK_S):
                continue
            watched.checked_at = now
            container, before_mb = watched.container, watched.container.written_mb
            try:
                container.measure_disk()
            except Exception:
                # Whatever is wrong with one container, the others are to be watched.
                log.exception("what container %s has written could not be measured", container.id[:12])
                continue
            is_ending = watched.ending is not None and watched.ending.is_alive()
            if not is_busy and not is_ending and container.written_mb > max(before_mb, container.disk_mb):
                watched.ending = threading.Thread(target=self._end, args=[container], name="tangram-end", daemon=True)
                watched.ending.start()

    def _end(self, container: Container) -> None:
        try:
            container.end(f"a program left running wrote more than the {container.disk_mb} MB that the environment may have on disk")
        except Exception:
            log.exception("container %s could not be held to its bound on disk", container.id[:12])

    def close(self) -> None:
        """Stop."""
        self._closed = True
        os.eventfd_write(self._wakeup, 1)
        self._thread.join()
        self._poller.close()
        os.close(self._wakeup)
