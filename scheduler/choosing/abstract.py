"""The interface of a chooser.

Where a queue is served in order, a *chooser* says which of the first actions start now, and on how many units. It keeps no state
between calls and reads no clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.model import Waiting
from scheduler.model.group import Group


@dataclass(frozen=True, slots=True)
class Choice:
    """Start `waiting` now on `units` units."""

    waiting: Waiting
    units: int


class Chooser(ABC):
    """One way of choosing amounts."""

    lookahead: int = 0
    """How many actions behind the candidates `choose` wants to see."""

    def wanted(self, waiting: Waiting, capacity: int) -> int:
        """Return the units that must be free for `waiting` to become a candidate, where there are never more than `capacity`."""
        return waiting.least

    @abstractmethod
    def choose(self, candidates: Sequence[Waiting], behind: Sequence[Waiting], free: int, group: Group, now: float) -> list[Choice]:
        """Say what starts now.

        `candidates` are the first of the queue, as many as fit into `free` units with `wanted` units each;
        `behind` are the next `lookahead` actions after them.
        """
