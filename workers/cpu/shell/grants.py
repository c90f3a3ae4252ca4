"""Who runs in an environment, and what commands left running in its other sessions may use meanwhile.

A server that one command has started is often tested by a later one, in another session, or by a request from outside. While a command
of an environment runs in the foreground, or a request to one of its servers, what is left in sessions without a command is in the
foreground too, on the cores of that. Otherwise, also while all commands are in the background, it is in the background.

| of a session                         | its processes have                                                            |
|--------------------------------------|-------------------------------------------------------------------------------|
| a command runs                       | the grant of the command                                                      |
| none runs, others do in the          | the cores of those; which cores is left open if it is for one of them          |
| foreground, or requests              |                                                                               |
| none runs in the foreground          | the background                                                                |
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from workers.cpu.abstract import Holding
from workers.cpu.errors import SandboxError
from workers.cpu.process.tree import Identity
from workers.cpu.shell.backend import Backend

log = logging.getLogger(__name__)


class Grants:
    """The grants of one environment's sessions. Any thread may change one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[Backend, Holding] = {}
        self._requests: dict[object, Holding] = {}
        self._idle: weakref.WeakSet[Backend] = weakref.WeakSet()
        self._lent: Holding | None = None
        self.have_begun = False
        """Whether a command has begun in the environment, so that something of a program may be there."""

    def begin(self, backend: Backend, holding: Holding, spared: Collection[Identity] | None = None) -> None:
        """Grant `holding` to a command that begins in a session, or goes on beside what it found there, which is `spared`."""
        with self._lock:
            self.have_begun = True
            self._idle.discard(backend)
            backend.begin(holding) if spared is None else backend.resume(holding, spared)
            self._running[backend] = holding
            self._lend()

    def resume(self, backend: Backend) -> None:
        """Take in a session in which no command runs, of the worker before this one."""
        with self._lock:
            self.have_begun = True
            backend.park()
            self._idle.add(backend)

    def hold(self, backend: Backend, holding: Holding) -> None:
        """Change the grant of a running command."""
        with self._lock:
            backend.hold(holding)
            self._running[backend] = holding
            self._lend()

    def over(self, backend: Backend) -> None:
        """Take the grant of a command back."""
        with self._lock:
            self._running.pop(backend, None)
            try:
                backend.park()
            finally:
                self._lend()
                if self._lent is not None:
                    self._lend_to(backend, self._lent)
                self._idle.add(backend)

    @property
    def serves_requests(self) -> bool:
        """Whether a request to a server is under way."""
        return bool(self._requests)

    @contextmanager
    def for_request(self, holding: Holding) -> Iterator[None]:
        """Let what commands left running use the grant of a request to one of them, while that is under way."""
        key = object()
        with self._lock:
            self._requests[key] = holding
            self._lend()
        try:
            yield
        finally:
            with self._lock:
                del self._requests[key]
                self._lend()

    def _lend(self) -> None:
        """Tell idle sessions what they may use, where that has changed."""
        running = (*self._running.values(), *self._requests.values())
        foreground = [holding.cores for holding in running if not holding.background]
        cores = sorted({core for each in foreground for core in each}) if all(foreground) else ()
        lent = Holding(tuple(cores)) if foreground else None
        if lent != self._lent:
            self._lent = lent
            for backend in list(self._idle):
                self._lend_to(backend, lent)

    def _lend_to(self, backend: Backend, lent: Holding | None) -> None:
        # What a command left running is no reason for another command to fail.
        try:
            backend.lend(lent) if lent is not None else backend.park()
        except (SandboxError, OSError) as error:
            log.warning("what a command left running does not get its cores: %s", error)
