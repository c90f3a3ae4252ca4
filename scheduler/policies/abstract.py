"""What a policy decides, and what it may look at.

A policy orders the waiting queue and says which waiting actions of one group start now, and on how many units.
A *group* is a set of interchangeable units at one place: the free cores of a node, the free GPU cells of a node,
the cores of a pod. A policy keeps no state between calls and reads no clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scheduler.model import Limits, Waiting
from tangram.errors import TangramError


class UnknownPolicy(TangramError, ValueError):
    """Raised when the name of a policy is not one."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Start `waiting` now on `units` units."""

    waiting: Waiting
    units: int


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


class Policy(ABC):
    """One way of scheduling."""

    name: str

    def order_key(self, waiting: Waiting, limits: Limits) -> tuple[float, ...]:
        """Return the place of an action in the queue: smaller goes first. Order of arrival by default."""
        return (waiting.seq,)

    def wanted(self, waiting: Waiting, capacity: int) -> int:
        """Return the units that must be free for `waiting` to become a candidate, where there are never more than `capacity`."""
        return waiting.least

    @abstractmethod
    def choose(self, candidates: Sequence[Waiting], behind: Sequence[Waiting], free: int, group: Group, now: float) -> list[Choice]:
        """Say what starts now.

        `candidates` are the first of the queue, as many as fit into `free` units with `wanted` units each;
        `behind` are those after them, as many as the policy's `lookahead` asks for.
        """

    resizes: bool = False
    """Whether running actions may be given more units and fewer again."""

    learns: bool = False
    """Whether durations are learned; if not, what was declared is all that is known."""

    told: bool = True
    """Whether replays tell it the recorded durations, as if all of them had been profiled ahead."""

    shares: bool = False
    """Whether jobs that hold more than their share come after the others."""

    ranks: bool = False
    """Whether actions that want cores stand in the order of the work that is expected to be left."""

    preempts: bool = False
    """Whether cores are taken back from running commands, which go on in the background."""

    shares_cells: bool = False
    """Whether instances of several services may be resident on one GPU cell, where its memory allows."""

    lookahead: int = 0
    """How many actions behind the candidates `choose` wants to see."""

    def pod_cores(self) -> int:
        """Return the cores held by an environment for its whole life; 0 where cores are granted per action."""
        return 0
