"""`static:N`, as frameworks do today: N cores belong to a trajectory for its whole life.

`cpu/pool.py` makes the pods when environments are placed. Here an action only picks its best degree of parallelism inside its own pod.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.choosing.abstract import Choice, Chooser
from scheduler.model import Waiting
from scheduler.model.group import Group


class InPod(Chooser):
    """Start actions in order on the best amount that is free in the pod."""

    def choose(self, candidates: Sequence[Waiting], behind: Sequence[Waiting], free: int, group: Group, now: float) -> list[Choice]:
        """Give each candidate its fastest amount that leaves the other candidates their smallest."""
        reserved = sum(waiting.least for waiting in candidates)
        choices = []
        for waiting in candidates:
            room = free - reserved + waiting.least
            allowed = [amount for amount in waiting.units if amount <= room]
            units = min(allowed, key=lambda amount: (waiting.duration_s(amount), amount))
            free -= units
            reserved -= waiting.least
            choices.append(Choice(waiting, units))
        return choices
