"""Waiting actions for models that are alike, and where an instance could go for them: what gpu/elastic.py thinks in."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from scheduler.gpu.cells import Instance
from scheduler.gpu.placement import Cleared
from scheduler.model import ServiceSpec, Waiting
from scheduler.state import Node

Place = tuple[Instance, Node]


@dataclass(slots=True, eq=False)
class Line:
    """Waiting actions that are alike, in their order, and the nodes that are looked at and could run them.

    `since` is when the first of them came in.
    """

    service: str
    units: tuple[int, ...]
    spec: ServiceSpec
    nodes: list[Node]
    waiting: list[Waiting] = field(default_factory=list)
    since: float = math.inf
    places: list[Place] = field(default_factory=list)
    """Where instances of their service, of whatever size, take actions; shared by all lines of the service."""
    stuck: bool = False
    """Whether no place is left for any of them in this look."""
    most: float = math.inf
    """The cells of the largest idle instance that they may start on; larger ones are to make way for smaller ones."""
    best: int = 0
    """The cells of an instance that is brought for them, or fewer where fewer are idle."""


@dataclass(frozen=True, slots=True)
class Room:
    """Where an instance could go: onto which cells, and who is evicted for it, in order."""

    node: Node
    cleared: Cleared

    @property
    def worth(self) -> tuple[int, int]:
        """What rooms are compared by: the largest, of these the one with the fewest evictions."""
        return len(self.cleared.cell_ids), -len(self.cleared.victims)
