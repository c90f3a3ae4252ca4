"""What a policy decides, and what it may look at.

A policy orders the waiting queue and says which waiting actions of one group start now, and on how many units.
A *group* is a set of interchangeable units at one place: the free cores of a node, the free GPU cells of a node,
the cores of a pod. A policy keeps no state between calls and reads no clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scheduler.model import Running, Waiting
from tangram.errors import TangramError


class UnknownPolicy(TangramError, ValueError):
    """Raised when the name of a policy is not one."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Start `waiting` now on `units` units."""

    waiting: Waiting
    units: int


@dataclass(frozen=True, slots=True)
class Change:
    """Let `running` go on with `units` units."""

    running: Running
    units: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What starts in a group and whose grant changes; shrinking comes first, it makes the room for the rest."""

    choices: list[Choice]
    changes: list[Change]


@dataclass(frozen=True, slots=True)
class Release:
    """Units that a running action will give back at `expected_end`, as far as anyone knows."""

    expected_end: float
    units: int


class Group(ABC):
    """What a policy sees of one set of units."""

    capacity: int
    """All units of the group, free or not."""

    @property
    @abstractmethod
    def free(self) -> int:
        """Units that can be granted now."""

    @abstractmethod
    def releases(self) -> Iterable[Release]:
        """Return the running actions' expected ends."""


class Policy(ABC):
    """One way of scheduling."""

    name: str

    def order_key(self, waiting: Waiting) -> tuple[float, ...]:
        """Return the place of an action in the queue: smaller goes first. Order of arrival by default."""
        return (waiting.seq,)

    def wanted(self, waiting: Waiting, capacity: int) -> int:
        """Return the units that must be free for `waiting` to become a candidate."""
        return waiting.least

    @abstractmethod
    def choose(self, candidates: Sequence[Waiting], behind: Sequence[Waiting], free: int, group: Group, now: float) -> list[Choice]:
        """Say what starts now.

        `candidates` are the first of the queue, as many as fit into `free` units with `wanted` units each;
        `behind` are those after them, as many as the policy's `lookahead` asks for.
        """

    def plan(
        self,
        candidates: Sequence[Waiting],
        behind: Sequence[Waiting],
        elastic: Sequence[Running],
        free: int,
        group: Group,
        now: float,
    ) -> Plan:
        """Say what starts and what is resized.

        Only policies that resize are shown `elastic`, the running actions that can use several amounts; their units
        above the smallest count as room for candidates.
        """
        return Plan(self.choose(candidates, behind, free, group, now), [])

    resizes: bool = False
    """Whether running actions may be given more units and fewer again."""

    lookahead: int = 0
    """How many actions behind the candidates `choose` wants to see."""

    def pod_cores(self) -> int:
        """Return the cores held by an environment for its whole life; 0 where cores are granted per action."""
        return 0
