"""`elastic`: ours. What it is made of, each part of which it can go without, and the order of the queues for cells and quotas.

| part | what it does |
|---|---|
| `preemption` | cores are taken back from commands of which much work is expected, and they go to the background (cpu/elastic.py) |
| `resizing` | running actions grow into cores that fall free (cpu/elastic.py) |
| `shrinking` | and give their extra ones back when others wait, or can use them better |
| `learning` | expected work, durations and curves are learned (learning/, durations.py) |
| `shares` | jobs that hold more than their share come after the others (shares.py) |
| `services` | waiting actions of a service share a swap, and have the more cells the fewer there are (gpu/elastic.py) |
| `sharing` | instances of several services may be resident on one cell, where memory allows; only with `services` |

For cells and quotas an action's place is the time it came in, put forward by one *window* (`Limits.window_s`) for each class of
priority. So nothing starves: within its job an action is overtaken only by those that come in at most one window later for each
class that they are above it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from scheduler.model import Limits, Waiting
from scheduler.policies.abstract import Choice, Group, Policy
from scheduler.policies.allocation import Demand, allocate

PARTS: Final = ("preemption", "resizing", "shrinking", "learning", "shares", "services", "sharing")
"""What `elastic` is made of, each of which it can go without, so that its worth can be measured."""


class Elastic(Policy):
    """Start as many as fit, give the spare units to whom they are worth most, and keep it so while they run."""

    name = "elastic"
    told = False
    ranks = True

    def __init__(self, without: Collection[str] = ()) -> None:
        self.preempts = "preemption" not in without
        self.resizes = "resizing" not in without
        self.shrinks = self.resizes and "shrinking" not in without
        self.learns = "learning" not in without
        self.shares = "shares" not in without
        self.services = "services" not in without
        self.shares_cells = self.services and "sharing" not in without

    def order_key(self, waiting: Waiting, limits: Limits) -> tuple[float, ...]:
        """Order by arrival, put forward by priority."""
        return (waiting.received_at - limits.window_s * waiting.action.priority, waiting.seq)

    def choose(self, candidates: Sequence[Waiting], behind: Sequence[Waiting], free: int, group: Group, now: float) -> list[Choice]:
        """Start every candidate, on the amounts with the least total duration; for cells, which are not resized."""
        amounts = allocate([Demand(waiting.units, waiting.durations_s, 1.0, waiting.steps) for waiting in candidates], free)
        return [Choice(waiting, units) for waiting, units in zip(candidates, amounts, strict=True)]
