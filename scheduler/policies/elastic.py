"""`elastic`: ours. What it is made of, each part of which it can go without, and the order of its queue.

| part | what it does |
|---|---|
| `resizing` | running actions grow into cores that fall free (lanes/elastic.py) |
| `shrinking` | and give their extra ones back when others wait, or can use them better |
| `fractions` | actions whose class needs little of a core share one where cores are short |
| `learning` | durations, curves and intensities are learned per class (durations.py) |
| `short-first` | of the waiting actions those that are expected to be short go first |
| `shares` | jobs that hold more than their share come after the others (shares.py) |
| `services` | waiting actions of a service share a swap, and have the more cells the fewer there are (lanes/services.py) |
| `sharing` | instances of several services may be resident on one cell, where memory allows; only with `services` |

The order: an action's place is the time it came in, put forward or back by bounded amounts, in units of the *window*
(`Limits.window_s`):

    received + min(SHORT_FIRST * work, window) - window * priority - min(SENIORITY * age of its trajectory, window)

where the work is that of the action's class by Gittins's rule (`Estimate.soonest_s`); with `tail_first`, the age counts
in full. Places are fixed when an action comes in, so a queue is never sorted anew; and nothing starves: within its job an
action is overtaken only by those that come in at most two windows later, and one more for each class of priority that
they are above it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from scheduler.durations import Estimate
from scheduler.model import Limits, Waiting
from scheduler.policies.abstract import Choice, Group, Policy
from scheduler.policies.allocation import Demand, allocate

PARTS: Final = ("resizing", "shrinking", "fractions", "learning", "short-first", "shares", "services", "sharing")
"""What `elastic` is made of, each of which it can go without, so that its worth can be measured."""

SHORT_FIRST: Final = 20.0
"""Seconds that an action is put back for each second of its expected work."""

SENIORITY: Final = 0.3
"""Seconds that an action is put forward for each second that its trajectory has been under way. A trajectory waits for one
action after the other, so the sum of all waits is least when trajectories are finished one by one, not all at the end."""

FRACTIONS: Final = (0.125, 0.25, 0.5)
"""The shares that a core can be divided into."""

MOST_SLOWER: Final = 0.1
"""Part of its duration by which an action may be slowed down by sharing a core, as expected for its class."""


class Elastic(Policy):
    """Start as many as fit, give the spare units to whom they are worth most, and keep it so while they run."""

    name = "elastic"
    told = False

    def __init__(self, without: Collection[str] = ()) -> None:
        self.resizes = "resizing" not in without
        self.shrinks = self.resizes and "shrinking" not in without
        self.fractions = self.resizes and "fractions" not in without
        self.learns = "learning" not in without
        self.short_first = "short-first" not in without
        self.shares = "shares" not in without
        self.services = "services" not in without
        self.shares_cells = self.services and "sharing" not in without

    def order_key(self, waiting: Waiting, limits: Limits, under_way_s: float) -> tuple[float, ...]:
        """Order by arrival, put forward or back by what is expected and by priority."""
        window_s = limits.window_s
        place = waiting.received_at - window_s * waiting.action.priority
        if self.short_first:
            place += min(SHORT_FIRST * waiting.estimate.soonest_s, window_s)
        if limits.tail_first or self.short_first:
            place -= min((1.0 if limits.tail_first else SENIORITY) * under_way_s, window_s)
        return (place, waiting.seq)

    def share_of_core(self, units: tuple[int, ...], estimate: Estimate) -> float:
        """Return the smallest share on which the class is slowed down by at most `MOST_SLOWER`.

        While others use the rest of the core a part x of the time, what needs the core for a part r of its own time takes
        `1 + r * x / (1 - x)` times as long, where bursts are independent. The others are taken to be like it.
        """
        busy = max(estimate.intensity, 1 / 64)
        if not self.fractions or units != (1,) or busy > 0.5:
            return 1.0
        for share in FRACTIONS:
            others = (1.0 - share) / share * busy
            if others < 1.0 and busy * others / (1.0 - others) <= MOST_SLOWER:
                return share
        return 1.0

    def choose(self, candidates: Sequence[Waiting], behind: Sequence[Waiting], free: int, group: Group, now: float) -> list[Choice]:
        """Start every candidate, on the amounts with the least total duration; for cells, which are not resized."""
        amounts = allocate([Demand(waiting.units, waiting.durations_s, 1.0, waiting.steps) for waiting in candidates], free)
        return [Choice(waiting, units) for waiting, units in zip(candidates, amounts, strict=True)]
