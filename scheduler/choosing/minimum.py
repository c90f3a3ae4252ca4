"""`fcfs`: first come, first served, everyone on the smallest amount."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.choosing.abstract import Choice, Chooser
from scheduler.model import Waiting
from scheduler.model.group import Group


class Minimum(Chooser):
    """Start actions in order of arrival on their smallest amounts."""

    def choose(self, candidates: Sequence[Waiting], behind: Sequence[Waiting], free: int, group: Group, now: float) -> list[Choice]:
        """Start every candidate on its smallest amount."""
        return [Choice(waiting, waiting.least) for waiting in candidates]
