"""How much each service is asked for: a rate that forgets, and what one action of it takes on so many cells.

Numbers only. Nothing here reads a clock: time is handed in, and never runs backwards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from scheduler.model import Waiting

FORGET_S: Final = 8.0
FORGET_DURATIONS: Final = 8.0
"""Seconds, or durations of one action where those are more, after which an arrival counts for 1/e of what it counted. Shorter
follows noise, longer misses the wave of a batch."""

SMOOTHING: Final = 0.125
"""Weight of the latest action in what an action of the service takes."""


@dataclass(slots=True)
class Demand:
    """What has been asked of one service lately. `rate` is in actions a second, as of `at`."""

    rate: float = 0.0
    at: float = 0.0
    units: tuple[int, ...] = ()
    durations_s: tuple[float, ...] = ()

    def come(self, waiting: Waiting, now: float) -> None:
        """Count an action; one that came in earlier, as after a restart, counts for as much less."""
        self.forget(now)
        if not self.units:
            self.units, self.durations_s = waiting.units, waiting.durations_s
        self.rate += math.exp(min(0.0, waiting.received_at - now) / self.forget_s) / self.forget_s
        if waiting.units != self.units:
            self.units, self.durations_s = waiting.units, waiting.durations_s
            return
        latest = zip(self.durations_s, waiting.durations_s, strict=True)
        self.durations_s = tuple(known + SMOOTHING * (seen - known) for known, seen in latest)

    @property
    def forget_s(self) -> float:
        """The seconds after which an arrival counts for 1/e."""
        return max(FORGET_S, FORGET_DURATIONS * max(self.durations_s, default=0.0))

    def forget(self, now: float) -> None:
        """Let the rate fade until `now`."""
        if now > self.at:
            self.rate *= math.exp((self.at - now) / self.forget_s)
            self.at = now


@dataclass(slots=True)
class Demands:
    """The demand for each service that was ever asked for, in the order of first arrival."""

    by_service: dict[str, Demand] = field(default_factory=dict)

    def come(self, waiting: Waiting, now: float) -> None:
        """Count an action."""
        service = waiting.action.service or ""
        demand = self.by_service.get(service)
        if demand is None:
            demand = self.by_service[service] = Demand(at=now)
        demand.come(waiting, now)

    def rate(self, service: str) -> float:
        """Return the arrivals a second, as of the last time that it was asked for or forgotten."""
        demand = self.by_service.get(service)
        return demand.rate if demand is not None else 0.0

    def loads(self, now: float) -> dict[str, float]:
        """Return for each service how many actions would be running in the mean, were each to start at once on its least amount."""
        for demand in self.by_service.values():
            demand.forget(now)
        return {service: demand.rate * demand.durations_s[0] for service, demand in self.by_service.items()}
