"""One round of the elastic dispatcher: the waiting actions in lines, and the instances that they could use.

A round is made when cells have changed, and is gone when it ends. It changes nothing itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from scheduler.gpu.cells import CellGroup, Instance
from scheduler.gpu.demand import Demands
from scheduler.gpu.pool import GpuPool, can_run
from scheduler.gpu.tuning import Tuning
from scheduler.model import ServiceSpec, Waiting
from scheduler.model.state import own_memory

Place = tuple[Instance, CellGroup]
"""An instance, and the cells of its node."""


@dataclass(slots=True, eq=False)
class Line:
    """Waiting actions that can take each other's place, in their order: same service, amounts, labels and memory.

    Attributes
    ----------
    able, groups
        The cells that could run the actions: of all nodes, and of those of the round.
    open
        The instances of the service that have a place free. All lines of a service share this list.
    since
        When the first action came in.
    stuck
        Whether no open instance is left on which an action could start.
    kept_off
        Whether only idle instances that are too large are left.
    best
        The cells of an instance that is brought for the line, or fewer where fewer are idle.
    largest
        The cells of the largest idle instance that an action may start on.

    """

    service: str
    units: tuple[int, ...]
    spec: ServiceSpec
    memory_mb: int
    able: list[CellGroup]
    groups: list[CellGroup]
    open: list[Place]
    waiting: list[Waiting] = field(default_factory=list)
    since: float = math.inf
    stuck: bool = False
    kept_off: bool = False
    best: int = 0
    largest: float = math.inf

    @property
    def first(self) -> Waiting:
        """The action that is next."""
        return self.waiting[0]


class Round:
    """What one round knows. `groups` are the cells that have changed; `demands` says how often services are asked for."""

    def __init__(self, pool: GpuPool, demands: Demands, tuning: Tuning, groups: list[CellGroup], now: float) -> None:
        self.state = pool.state
        self.all_groups = pool.groups
        self.demands = demands
        self.tuning = tuning
        self.groups = groups
        self.now = now
        self.lines: dict[tuple[object, ...], Line] = {}
        self._open: dict[str, list[Place]] = {}
        self._residents: dict[str, list[Place]] = {}
        for place in _places(groups):
            if place[0].takes:
                self._open.setdefault(place[0].service, []).append(place)
        self.refresh()

    def refresh(self) -> None:
        """Look again which instances are resident on all nodes. Those that are being evicted count as gone."""
        self._residents = {}
        for place in _places(self.all_groups.values()):
            if place[0].evicting_for is None:
                self._residents.setdefault(place[0].service, []).append(place)

    def line_of(self, waiting: Waiting) -> Line:
        """Return the line that an action belongs to."""
        action = waiting.action
        waiting.alike = waiting.alike or (action.service, waiting.units, action.requires, own_memory(action))
        line = self.lines.get(waiting.alike)
        if line is None:
            service = action.service or ""
            spec = self.state.services.get(service, ServiceSpec(name=service))
            able = [group for group in self.all_groups.values() if can_run(waiting, group, self.state)]
            groups = [group for group in self.groups if group in able]
            line = Line(service, waiting.units, spec, own_memory(action), able, groups, self._open.get(service, []))
            self.lines[waiting.alike] = line
        return line

    def close_idle(self) -> None:
        """Have no more actions start on idle instances, except on pinned ones, which cannot be evicted."""
        for places in self._open.values():
            places[:] = [(instance, group) for instance, group in places if instance.active or instance.pinned]

    def residents(self, service: str) -> list[Place]:
        """Return the instances of a service."""
        return self._residents.get(service, [])

    def usable(self, line: Line) -> list[Place]:
        """Return the instances, busy or not, on which a line could run."""
        return [place for place in self.residents(line.service) if place[0].size in line.units]

    def shut_out(self, line: Line) -> bool:
        """Say whether a line could run on no instance, or only on idle ones on whose cells others compute."""
        return all(not instance.busy and group.blocked(instance) for instance, group in self.usable(line))

    def asked(self, instance: Instance) -> float:
        """Return how often an instance is asked for, in actions a second."""
        return self.demands.rate(instance.service) / max(1, len(self.residents(instance.service)))


def _places(groups: Iterable[CellGroup]) -> Iterator[Place]:
    return ((instance, group) for group in groups for instance in group.instances)
