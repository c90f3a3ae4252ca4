"""The parts of a worker that its tasks use: its node, a sandbox, a host of services, an HTTP client. They are found by type.

Celery imports the modules of tasks before a worker knows what it is, so tasks ask here when they run. A process is one worker. If several
workers live in one process, each has a runtime of its own. Each of its threads calls `enter` first, since a thread begins in `PROCESS`.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


class Runtime:
    """The parts of one worker."""

    def __init__(self) -> None:
        self._parts: dict[type, object] = {}

    def provide(self, kind: type[T], part: T) -> None:
        """Set a part up, or replace it."""
        self._parts[kind] = part

    def part(self, kind: type[T]) -> T | None:
        """Return a part; None where there is none."""
        found = self._parts.get(kind)
        return found  # type: ignore[return-value]


PROCESS = Runtime()
"""The worker that this process is."""

_here: ContextVar[Runtime] = ContextVar("tangram-runtime", default=PROCESS)


def runtime() -> Runtime:
    """Return the worker that the caller runs in."""
    return _here.get()


def enter(runtime: Runtime) -> None:
    """Run in this worker from now on, in the present context."""
    _here.set(runtime)
