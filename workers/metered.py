"""How far commands have got in the background, as their node reports it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from app.action_task import Call
from workers.cpu.abstract import Usage

LEAST_GROWTH_S, LEAST_GROWTH = 0.05, 0.2
"""How far a command must have got in the background since the last report for another: in core-seconds, and as a part of that report's."""


@dataclass(slots=True)
class Metered:
    """A command that runs; `reported_s` are the core-seconds in the background that were reported last."""

    call: Call
    meter: Callable[[], Usage | None]
    reported_s: float = 0.0

    def take_report(self) -> float | None:
        """Return its core-seconds in the background where they are to be reported, and take them for reported."""
        used = self.meter()
        if used is None or used.background_cpu_s - self.reported_s < max(LEAST_GROWTH_S, LEAST_GROWTH * self.reported_s):
            return None
        self.reported_s = used.background_cpu_s
        return self.reported_s
