"""The demand for each service: actions a second, and the load that they make. Both fade with time.

Nothing here reads a clock: time is handed in, and never runs backwards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from scheduler.gpu.tuning import TUNING
from scheduler.model import Waiting

LEAST_S = 1.0
"""Seconds that an action counts as lasting at least, where `Tuning.fading` speaks of durations."""


@dataclass(slots=True)
class Demand:
    """The recent demand for one service, as of `at`.

    `rate` is in actions a second. `load` is the mean number of actions that would run if each started at once on its least amount.
    """

    at: float
    rate: float = 0.0
    load: float = 0.0


class Demands:
    """The demand for each service, in the order of first arrival.

    An arrival counts for 1/e of what it counted after `Tuning.fading` durations of the service's actions.
    """

    def __init__(self) -> None:
        self._by_service: dict[str, Demand] = {}

    def arrived(self, waiting: Waiting, now: float) -> None:
        """Count an action. An action that came in earlier, as after a restart, has faded for that time."""
        service, duration_s = waiting.action.service or "", waiting.durations_s[0]
        demand = self._by_service.setdefault(service, Demand(now))
        self._fade(demand, now)
        fade_s = self._fade_s(demand, duration_s)
        weight = math.exp(min(0.0, waiting.received_at - now) / fade_s) / fade_s
        demand.rate += weight
        demand.load += weight * duration_s

    def rate(self, service: str) -> float:
        """Return the arrivals a second, as of the last arrival or the last call of `loads`."""
        demand = self._by_service.get(service)
        return demand.rate if demand is not None else 0.0

    def loads(self, now: float) -> dict[str, float]:
        """Return the load of each service."""
        for demand in self._by_service.values():
            self._fade(demand, now)
        return {service: demand.load for service, demand in self._by_service.items()}

    def _fade(self, demand: Demand, now: float) -> None:
        if now > demand.at and demand.rate:
            factor = math.exp((demand.at - now) / self._fade_s(demand, 0.0))
            demand.rate, demand.load = demand.rate * factor, demand.load * factor
        demand.at = now

    def _fade_s(self, demand: Demand, first_s: float) -> float:
        """Return the seconds after which an arrival counts for 1/e."""
        mean_s = demand.load / demand.rate if demand.rate else first_s
        return TUNING.fading * max(LEAST_S, mean_s)
