"""The choosers that look at one action at a time: those of `fcfs`, `fixed:N` and `static:N`."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.choosing.abstract import Choice, Chooser
from scheduler.model import Waiting
from scheduler.model.group import Group


class Minimum(Chooser):
    """`fcfs`: start actions in order of arrival on their smallest amounts."""

    def choose(self, candidates: Sequence[Waiting], behind: Sequence[Waiting], free: int, group: Group, now: float) -> list[Choice]:
        """Start every candidate on its smallest amount."""
        return [Choice(waiting, waiting.least) for waiting in candidates]


class Fixed(Chooser):
    """`fixed:N`: start actions in order of arrival on N units, or the nearest amount below that they allow."""

    def __init__(self, units: int) -> None:
        self._units = units

    def wanted(self, waiting: Waiting, capacity: int) -> int:
        """Return the largest allowed amount up to N and up to the node; the smallest amount if there is no such amount."""
        limit = min(self._units, capacity)
        return max((amount for amount in waiting.units if amount <= limit), default=waiting.least)

    def choose(self, candidates: Sequence[Waiting], behind: Sequence[Waiting], free: int, group: Group, now: float) -> list[Choice]:
        """Start every candidate on the amount that it waited for."""
        return [Choice(waiting, self.wanted(waiting, group.most)) for waiting in candidates]


class InPod(Chooser):
    """`static:N`, as frameworks do today: N cores, a pod, belong to a trajectory for its whole life.

    `cpu/pool.py` makes the pods when environments are placed. Here actions start in order on the best amount that is free in their own pod.
    """

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
