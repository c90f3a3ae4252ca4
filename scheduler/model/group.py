"""A group: interchangeable units at one place, such as the free cores of a node, its GPU cells, or the cores of a pod."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Release:
    """Units that a running action will give back at `expected_end`, as far as anyone knows."""

    expected_end: float
    units: int


class Changeable:
    """What a pool holds a round over. `changed` are those of its pool in which something has changed, in the order of the changes."""

    def __init__(self, changed: dict[Any, None]) -> None:
        self._changed = changed

    def touch(self) -> None:
        """Have the pool hold a round over it when the present event is dealt with."""
        self._changed[self] = None


class Group(Changeable, ABC):
    """What a chooser sees of one set of units."""

    capacity: int
    """All units of the group, free or not."""

    @property
    def most(self) -> int:
        """Units that can ever be granted to one action, as things stand: all but those that are held for good."""
        return self.capacity

    @property
    @abstractmethod
    def free(self) -> int:
        """Units that can be granted now."""

    @abstractmethod
    def releases(self) -> Iterable[Release]:
        """Return the running actions' expected ends."""
