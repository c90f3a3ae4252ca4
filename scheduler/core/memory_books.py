"""The books of memory: what the environments of each node may use, and what they are expected to hold (`scheduler/core/memory.py`).

    free = memory - limits of the others - allowances - reserve
    reserve = the largest (limit - allowance) on the node

`Node.memory_free` is what is free. It is below 0 while an environment uses the reserve.

A node has room for an open while it has memory for the peaks that its environments are expected to reach, with `SIGMAS` standard
deviations of their sum, and for the reserve.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from scheduler.cpu.heap import GONE, Heap
from scheduler.learning.holdings import Holdings
from scheduler.model import Environment
from scheduler.model.state import Node, State, is_elastic, memory_of
from tangram.action import Action
from tangram.wire import HEADROOM_MB

SHOWN_PAUSED: Final = 20
"""Most paused environments that are shown of a node."""

SIGMAS: Final = 2.0
"""Standard deviations of the sum of the expected peaks for which a node keeps room. Beyond them, environments wait for each other."""


@dataclass(slots=True, eq=False)
class Book:
    """The memory of one environment. `peak_mb` is the most that it has held between actions, None before its first action has ended.

    `serial` is the number of the last allowance that was sent to the node, 0 if this scheduler has sent none. The book of an environment
    that an earlier scheduler had opened is `is_unheard`, and has its limit, until the node has said what the environment may use. A
    book `is_settled` once the report of the last action has come. Node and book then have the same allowance, until another is sent.
    """

    environment: Environment
    allowance_mb: int = 0
    holding_mb: int = 0
    peak_mb: int | None = None
    running: dict[str, None] = field(default_factory=dict)
    paused_at: float | None = None
    version: int = 0
    serial: int = 0
    is_unheard: bool = False
    is_settled: bool = False

    @property
    def gap_mb(self) -> int:
        """The memory that is missing to its limit."""
        return self.environment.memory_mb - self.allowance_mb


@dataclass(slots=True, eq=False)
class NodeMemory:
    """The books of one node. `turn` names the environment that may use the reserve."""

    node: Node
    books: dict[str, Book] = field(default_factory=dict)
    allowed_mb: int = 0
    reserve_mb: int = 0
    gaps: Heap[Book] = field(default_factory=Heap)
    versions: int = 0
    paused: dict[str, Book] = field(default_factory=dict)
    turn: str = ""
    short_since: float | None = None

    @property
    def available_mb(self) -> int:
        """The memory that is not booked, with the reserve."""
        return self.node.memory_free + self.reserve_mb

    def allow(self, book: Book, allowance_mb: int) -> None:
        """Change an allowance, and the reserve with it. A book that has been taken out is to have none."""
        is_booked = book.environment.id in self.books
        if is_booked and book.version and allowance_mb == book.allowance_mb:
            return
        before_mb = self.allowed_mb + self.reserve_mb
        self.allowed_mb += allowance_mb - book.allowance_mb
        book.allowance_mb = allowance_mb
        if is_booked:
            self.versions += 1
            book.version = self.versions
            self.gaps.push(book, -book.gap_mb)
        else:
            book.version = GONE
        first = self.gaps.first()
        self.reserve_mb = -first[0] if first is not None else 0
        self.node.memory_free += before_mb - self.allowed_mb - self.reserve_mb


@dataclass(frozen=True, slots=True)
class Room:
    """The memory of a node that its environments are not expected to need, and the part of it that is the reserve."""

    memory_mb: int
    reserve_mb: int


class MemoryBooks:
    """The books of all nodes, by name. Nodes that grant no memory have none."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.holdings = Holdings()
        self.nodes: dict[str, NodeMemory] = {}
        self._serial = 0

    def number(self) -> int:
        """Return the number of an allowance that is about to be sent."""
        self._serial += 1
        return self._serial

    def grants(self, environment: Environment, node: Node) -> bool:
        """Say whether an environment on a node is granted memory as it uses it."""
        return environment.elastic and self.grants_on(node)

    def grants_on(self, node: Node) -> bool:
        """Say whether memory is granted on a node at all."""
        return node.spec.grants_memory and self._state.rules.grants_memory

    def shown(self, name: str, now: float) -> dict[str, Any] | None:
        """Return what `scheduler/live/document.py` says of a node's memory; None where limits are booked."""
        memory = self.nodes.get(name)
        if memory is None:
            return None
        return {
            "granted_mb": memory.allowed_mb,
            "held_mb": sum(book.holding_mb for book in memory.books.values()),
            "reserve_mb": memory.reserve_mb,
            "paused_count": len(memory.paused),
            "paused": {one: now - (book.paused_at or now) for one, book in islice(memory.paused.items(), SHOWN_PAUSED)},
        }

    def of(self, environment_id: str) -> tuple[NodeMemory, Book] | None:
        """Return the books of an environment; None if it is booked by limit."""
        environment = self._state.environments.get(environment_id)
        memory = self.nodes.get(environment.node or "") if environment is not None else None
        book = memory.books.get(environment_id) if memory is not None else None
        return (memory, book) if memory is not None and book is not None else None

    def counted_mb(self, action: Action) -> int:
        """Return the memory with which the environment of an open is to count for its job."""
        elastic = is_elastic(action) and self._state.rules.grants_memory
        return self.expected_mb(action.job, memory_of(action)) if elastic else memory_of(action)

    def expected_of(self, environment: Environment) -> int:
        """Return the memory that an environment on a node is expected to hold, or its limit."""
        found = self.of(environment.id)
        return environment.memory_mb if found is None else max(environment.counted_mb, found[1].allowance_mb)

    def expected_mb(self, job: str, limit_mb: int) -> int:
        """Return the memory that an environment of a job is expected to hold at its peak."""
        known = self.holdings.expected_mb(job)
        return limit_mb if known is None else min(limit_mb, max(HEADROOM_MB, math.ceil(known[0])))

    def room(self, node: Node) -> Room:
        """Return what environments may open on a node."""
        memory = self.nodes.get(node.spec.name)
        if memory is None:
            return Room(node.memory_free, 0)
        if memory.paused:
            return Room(-1, 0)
        expected_mb, variance, reserve_mb = 0, 0.0, 0
        for book in memory.books.values():
            job, limit_mb = book.environment.job, book.environment.memory_mb
            own_mb = max(self.expected_mb(job, limit_mb), book.allowance_mb)
            expected_mb += own_mb
            reserve_mb = max(reserve_mb, limit_mb - own_mb)
            known = self.holdings.expected_mb(job)
            variance += known[1] if known is not None else 0.0
        spread_mb = math.ceil(SIGMAS * math.sqrt(variance))
        return Room(memory.available_mb + memory.allowed_mb - expected_mb - spread_mb, reserve_mb)

    def most_limit_mb(self, node: Node, room: Room, job: str, *, elastic: bool) -> int:
        """Return the largest limit of an environment of a job that may open on a node with this room."""
        if elastic and self.grants_on(node):
            expected_mb = self.expected_mb(job, room.memory_mb)
            if expected_mb + room.reserve_mb <= room.memory_mb:
                return room.memory_mb
        return room.memory_mb - room.reserve_mb
