"""`fixed:N`: every action on N units, or the nearest amount below that it allows."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.choosing.abstract import Choice, Chooser
from scheduler.model import Waiting
from scheduler.model.group import Group


class Fixed(Chooser):
    """Start actions in order of arrival on a fixed degree of parallelism."""

    def __init__(self, units: int) -> None:
        self._units = units

    def wanted(self, waiting: Waiting, capacity: int) -> int:
        """Return the largest allowed amount up to N and up to the node; the smallest amount if there is no such amount."""
        limit = min(self._units, capacity)
        return max((amount for amount in waiting.units if amount <= limit), default=waiting.least)

    def choose(self, candidates: Sequence[Waiting], behind: Sequence[Waiting], free: int, group: Group, now: float) -> list[Choice]:
        """Start every candidate on the amount that it waited for."""
        return [Choice(waiting, self.wanted(waiting, group.most)) for waiting in candidates]
