"""Watches the containers of environments: that they stand, and what they write.

One thread. A container that ends is told at once. What containers have written the engine is asked while their
environments are busy, so a command goes past its bound by what it writes between two looks; where the engine's storage
holds the bound itself, nothing is asked.
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

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Watched:
    container: Container
    is_busy: Callable[[], bool]
    on_end: Callable[[], None]


class Watch:
    """Tells `on_end` of containers that have ended, and looks every `look_s` seconds at what busy ones have written."""

    def __init__(self, look_s: float) -> None:
        self._look_s = look_s
        self._poller = select.epoll()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poller.register(self._bell, select.EPOLLIN)
        self._lock = threading.Lock()
        self._watched: dict[int, _Watched] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tangram-watch", daemon=True)
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
        look_at = time.monotonic() + self._look_s
        while not self._closed:
            for descriptor, _ in self._poller.poll(max(0.0, look_at - time.monotonic())):
                self._tell(descriptor)
            if time.monotonic() >= look_at:
                self._look()
                look_at = time.monotonic() + self._look_s

    def _tell(self, descriptor: int) -> None:
        with self._lock:
            watched = self._watched.pop(descriptor, None)
            if watched is not None:
                self._poller.unregister(descriptor)
        if watched is not None:
            watched.on_end()

    def _look(self) -> None:
        with self._lock:
            busy = [watched.container for watched in self._watched.values() if watched.is_busy()]
        for container in busy:
            if self._closed:
                return
            container.look_at_disk()

    def close(self) -> None:
        """Stop."""
        self._closed = True
        os.eventfd_write(self._bell, 1)
        self._thread.join()
        self._poller.close()
        os.close(self._bell)
