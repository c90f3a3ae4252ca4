"""A run of actions on GPU cells in virtual time, with a look at the core after each event."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from scheduler.core.core import Core
from scheduler.model import UNLIMITED, Grant, NodeSpec, ServiceSpec, commands, events
from scheduler.policies import make_policy
from scheduler.sim.cell_books import CellBooks
from tangram.action import Action, Cost


@dataclass(frozen=True)
class Ask:
    """An action: when it comes, for what, on how many cells, for how long."""

    at: float
    service: str
    cells: tuple[int, ...]
    work_s: float


@dataclass
class CellsRun:
    """Drives a core of `elastic`; `watch(core, before, now)` is called after each event, with the time of the last one."""

    services: Sequence[ServiceSpec]
    nodes: Sequence[int]
    watch: Callable[[Core, float, float], None]
    without: tuple[str, ...] = ()
    cell_memory_mb: int = UNLIMITED
    running: dict[str, Grant] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    restores: int = 0
    books: CellBooks = field(init=False)

    def __post_init__(self) -> None:
        self.books = CellBooks({spec.name: spec for spec in self.services})

    def run(self, asks: Sequence[Ask]) -> None:
        """Submit everything, and go on until nothing happens any more."""
        core = Core(make_policy("elastic", without=self.without), services=tuple(self.services))
        for number, cells in enumerate(self.nodes):
            node = NodeSpec(name=f"n{number}", pools=("gpu",), cells=cells, cell_memory_mb=self.cell_memory_mb)
            self.books.join(node)
            core.handle(events.NodeJoined(node=node), 0.0)
        heap: list[tuple[float, int, Any]] = []
        for number, ask in enumerate(asks):
            action = Action(kind="gpu.score", cost=Cost.of(cells=list(ask.cells)), service=ask.service)
            heap.append((ask.at, number, events.Submitted(id=str(number), action=action, submitted_at=ask.at)))
        heapq.heapify(heap)
        order, before = len(asks), 0.0
        while True:
            wake = core.next_wake(before)
            if not heap and wake is None:
                break
            now, event = before, None
            if heap and (wake is None or heap[0][0] <= wake):
                now, _, event = heapq.heappop(heap)
            else:
                now, event = max(before, wake or 0.0), events.Tick()
            if isinstance(event, events.Finished):
                del self.running[event.id]
                self.books.finish(event.id)
            for command in core.handle(event, now):
                if isinstance(command, commands.Start):
                    order += 1
                    heapq.heappush(heap, (self._start(command, asks, now), order, self._end_of(command)))
                elif isinstance(command, commands.Finish):
                    self.ended.append(command.id)
            self.watch(core, before, now)
            before = now

    def _start(self, command: commands.Start, asks: Sequence[Ask], now: float) -> float:
        """Take a grant, and return when it ends."""
        ask, grant = asks[int(command.id)], command.grant
        spec = next(spec for spec in self.services if spec.name == ask.service)
        assert grant.units in ask.cells
        self.books.start(command.id, ask.service, grant)
        self.running[command.id] = grant
        self.restores += grant.restore
        return now + ask.work_s + (spec.restore_s if grant.restore else 0.0)

    @staticmethod
    def _end_of(command: commands.Start) -> events.Finished:
        return events.Finished(id=command.id, attempt=command.grant.attempt, status="succeeded", execution_s=1.0)
