"""A group: interchangeable units at one place, for example the cores of a node, its GPU cells, or the cores of a pod."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Release:
    """Units that a running action is expected to give back at `expected_end`."""

    expected_end: float
    units: int


class Changeable:
    """A thing over which a pool holds rounds. `changed` lists the changed things of the pool, in the order of their changes."""

    def __init__(self, changed: dict[Any, None]) -> None:
        self._changed = changed

    def touch(self) -> None:
        """Have the pool hold a round over this group at the end of the present event."""
        self._changed[self] = None


class Group(Changeable, ABC):
    """A chooser's view of one set of units."""

    capacity: int
    """All units of the group, free or not."""

    @property
    def most(self) -> int:
        """Units that one action could be granted at most: all units but those that are held for good."""
        return self.capacity

    @abstractmethod
    def releases(self) -> Iterable[Release]:
        """Return the running actions' expected ends."""
