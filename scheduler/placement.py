"""Which instances of which services the cells should hold: the *plan*, a target for each service.

1. A service with so many instances of one size is a queue with as many servers as its instances have places. How long an
   action stays in it follows from its rate and its duration on that size (`sojourn_s`).
2. What it costs is its rate times that stay: the actions in it at a time, by Little's law. A service without an instance
   costs what restoring one for each action would.
3. The plan is the one with the least cost in all that fits onto the cells (`policies.allocation`).

A plan says how many instances of which size, not where: cells of all nodes count alike. It is a wish; who starts where, and
who is thrown off, is decided in lanes/services.py. Pure functions of numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from scheduler.policies.allocation import Demand, allocate

IDLE: Final = 0.05
"""Load below which one more instance of the same size changes nothing."""

FULL: Final = 0.97
"""Load up to which the formula holds. Beyond it a queue grows without end, and what counts is how fast."""

OVERLOAD_S: Final = 15.0
"""Seconds by which an action that comes on top of that is taken to be late."""

VARIATION: Final = 0.6
"""Half of the squared variations of arrivals and durations together: exponential arrivals, durations that differ by a third."""

ABSENT_RESTORES: Final = 12.0
"""Restores that an action is charged with whose service is to have no instance. Its own is the least of it: something else makes
way and comes back, others wait meanwhile, and so does it until something may make way."""

ABSENT_S: Final = 1.0
"""Seconds that such an action is charged with besides, so that services that are restored in no time are kept, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """What is known of one service: actions a second, its sizes with the seconds on each, and how many instances there may be."""

    rate: float
    units: tuple[int, ...]
    durations_s: tuple[float, ...]
    places: int
    restore_s: float
    most: int


@dataclass(frozen=True, slots=True)
class Target:
    """So many instances of so many cells each."""

    instances: int = 0
    size: int = 0

    @property
    def cells(self) -> int:
        """The cells of all of them."""
        return self.instances * self.size


def plan(wants: Sequence[Want], cells: int) -> list[Target]:
    """Return a target for each service, with the least cost in all for at most `cells` cells."""
    options = [_options(want, cells) for want in wants]
    demands = [Demand(tuple(held), tuple(cost for cost, _ in held.values())) for held in options]
    return [held[amount][1] for held, amount in zip(options, allocate(demands, cells), strict=True)]


def _options(want: Want, cells: int) -> dict[int, tuple[float, Target]]:
    """Return cost and target by cells, ascending, each better than all with fewer cells."""
    best: dict[int, tuple[float, Target]] = {}
    for size, duration_s in zip(want.units, want.durations_s, strict=True):
        for instances in range(1, min(want.most, cells // size) + 1):
            cost = want.rate * sojourn_s(want.rate, instances * want.places, duration_s)
            held = best.get(instances * size)
            if held is None or cost < held[0]:
                best[instances * size] = (cost, Target(instances, size))
            if want.rate * duration_s < IDLE * instances * want.places:
                break  # so idle that one more changes nothing
    absent_s = want.durations_s[0] + ABSENT_RESTORES * want.restore_s + ABSENT_S
    kept: dict[int, tuple[float, Target]] = {0: (want.rate * absent_s, Target())}
    least = kept[0][0]
    for held_cells in sorted(best):
        if best[held_cells][0] < least - 1e-9:
            kept[held_cells] = best[held_cells]
            least = best[held_cells][0]
    return kept


def sojourn_s(rate: float, places: int, duration_s: float) -> float:
    """Return the mean seconds from arrival to end, at `rate` a second on so many places, by Sakasegawa's approximation (1977).

    Above `FULL` the rest of the rate is charged `OVERLOAD_S` for each action, so that more places are always worth more.
    """
    if rate <= 0.0:
        return duration_s
    load = rate * duration_s / places
    within = min(load, FULL)
    wait_s = VARIATION * duration_s * math.pow(within, math.sqrt(2.0 * (places + 1)) - 1.0) / (places * (1.0 - within))
    if load <= FULL:
        return duration_s + wait_s
    return duration_s + wait_s + OVERLOAD_S * (1.0 - FULL / load)
