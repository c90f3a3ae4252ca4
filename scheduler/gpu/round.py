"""One round of the elastic dispatcher: the waiting actions in service queues, and the instances that they could use.

A round is made when cells have changed, and dropped at its end. It changes nothing itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from scheduler.gpu.cells import CellGroup, Instance
from scheduler.gpu.demand import Demands
from scheduler.gpu.pool import GpuPool, can_run
from scheduler.model import ServiceSpec, Waiting
from scheduler.model.state import own_memory

Resident = tuple[Instance, CellGroup]
"""An instance, and the cells of its node."""


@dataclass(slots=True, eq=False)
class ServiceQueue:
    """Waiting actions with the same service, amounts, labels and memory, in order. They are interchangeable."""

    service: str
    units: tuple[int, ...]
    spec: ServiceSpec
    memory_mb: int
    able: list[CellGroup]
    groups: list[CellGroup]
    """The nodes' cells that could run the actions: all, and those of the round."""
    open: list[Resident]
    """Instances of the service with a free place. All queues of a service share this list."""
    waiting: list[Waiting] = field(default_factory=list)
    since: float = math.inf
    """The arrival of the first action."""
    stuck: bool = False
    """Whether no open instance is left for an action."""
    kept_off: bool = False
    """Whether the only instances left are idle and too large."""
    best: int = 0
    """The best number of cells of a new instance."""
    largest: float = math.inf
    """The largest idle instance on which an action may start, in cells."""

    @property
    def first(self) -> Waiting:
        """The action that is next."""
        return self.waiting[0]


class Round:
    """The view of one round. `groups` are the changed cells; `demands` holds the demand for the services."""

    def __init__(self, pool: GpuPool, demands: Demands, groups: list[CellGroup], now: float) -> None:
        self.state = pool.state
        self.all_groups = pool.groups
        self.demands = demands
        self.groups = groups
        self.now = now
        self.queues: dict[tuple[object, ...], ServiceQueue] = {}
        self._open: dict[str, list[Resident]] = {}
        self._residents: dict[str, list[Resident]] = {}
        for resident in _instances(groups):
            if resident[0].takes:
                self._open.setdefault(resident[0].service, []).append(resident)
        self.refresh()

    def refresh(self) -> None:
        """Look again which instances are resident on all nodes.

        Instances that make way, or whose node takes nothing new, count as gone.
        """
        self._residents = {}
        for resident in _instances(self.all_groups.values()):
            if resident[0].evicting_for is None and resident[1].node.takes_new:
                self._residents.setdefault(resident[0].service, []).append(resident)

    def queue_of(self, waiting: Waiting) -> ServiceQueue:
        """Return the service queue that an action belongs to."""
        action = waiting.action
        waiting.alike = waiting.alike or (action.service, waiting.units, action.requires, own_memory(action))
        queue = self.queues.get(waiting.alike)
        if queue is None:
            service = action.service or ""
            spec = self.state.services.get(service, ServiceSpec(name=service))
            able = [group for group in self.all_groups.values() if can_run(waiting, group, self.state)]
            groups = [group for group in self.groups if group in able]
            queue = ServiceQueue(service, waiting.units, spec, own_memory(action), able, groups, self._open.get(service, []))
            self.queues[waiting.alike] = queue
        return queue

    def close_idle(self) -> None:
        """Let no more actions start on idle instances, except on pinned instances, which cannot be evicted."""
        for residents in self._open.values():
            residents[:] = [(instance, group) for instance, group in residents if instance.active or instance.pinned]

    def residents(self, service: str) -> list[Resident]:
        """Return the instances of a service."""
        return self._residents.get(service, [])

    def usable(self, queue: ServiceQueue) -> list[Resident]:
        """Return the instances, busy or not, on which a queue could run."""
        return [resident for resident in self.residents(queue.service) if resident[0].size in queue.units]

    def shut_out(self, queue: ServiceQueue) -> bool:
        """Say whether no usable instance is resident for a queue, or each is idle while others compute on its cells."""
        return all(not instance.busy and group.blocked(instance) for instance, group in self.usable(queue))

    def asked(self, instance: Instance) -> float:
        """Return the demand for an instance, in actions a second."""
        return self.demands.rate(instance.service) / max(1, len(self.residents(instance.service)))


def _instances(groups: Iterable[CellGroup]) -> Iterator[Resident]:
    return ((instance, group) for group in groups for instance in group.instances)
