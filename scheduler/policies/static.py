"""`static:N`: what frameworks do today; N cores belong to a trajectory for its whole life.

The pods themselves are made by the core when an environment is placed; here an action only picks its best degree
of parallelism inside its own pod.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.model import Waiting
from scheduler.policies.abstract import Choice, Group, Policy


class Static(Policy):
    """Hold `cores` cores per environment; start actions in order on the best amount that is free in the pod."""

    def __init__(self, cores: int) -> None:
        self.cores = cores
        self.name = f"static:{cores}"

    def pod_cores(self) -> int:
        """Return N."""
        return self.cores

    def choose(self, candidates: Sequence[Waiting], behind: Sequence[Waiting], free: int, group: Group, now: float) -> list[Choice]:
        """Give each candidate its fastest amount that leaves the others of this moment their smallest."""
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
