"""The interface of observers, such as metrics. Implemented in `app/metrics/scheduler.py`."""

from __future__ import annotations

from typing import Protocol

from scheduler.core.core import Core


class Observer(Protocol):
    """Observes the scheduler. Its methods run in the scheduler's only thread. They must be quick and must not raise."""

    def decided(self, seconds: float) -> None:
        """Note the duration of an event that led to decisions."""

    def looked(self, core: Core, now: float) -> None:
        """Read the core's state. Called at each housekeeping."""
