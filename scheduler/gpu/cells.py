"""GPU cells and the services that are resident on them.

An *instance* is a service on a set of cells; it keeps them between actions until the cells are needed
(evict-on-execution), and runs up to `max_concurrency` actions at once. Where cells are shared (`CellGroup.sharing`), several
instances may be resident on a cell, as long as their memory fits; only one of them computes on it at a time. A service
that declares no memory, or cells of which nobody knows how much they have, are not shared: such an instance takes whole cells.

| from | on | to |
|---|---|---|
| – | action without a place on a resident instance | busy, after a restore |
| – | its node has joined, and the service is warm | restoring |
| restoring | its worker says that it is there | idle |
| busy | last action ended | idle, still resident |
| idle | action of its service | busy |
| idle | cells needed by another instance | evicted: least recently used first, or as gpu/eviction.py says |
| busy, idle | an overdue action of a service that is nowhere (gpu/ageing.py) | leaving: takes no more actions, evicted once idle |
| leaving | the overdue action is gone, or its service is there | busy or idle |
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from scheduler.gpu.placement import Cleared, Clearing
from scheduler.model import UNLIMITED, Evicted, Running, ServiceSpec
from scheduler.policies.abstract import Group, Release


@dataclass(slots=True, eq=False)
class Instance:
    """A service resident on cells since `since`, with `memory_mb` on each.

    `pinned` instances are never evicted. `leaving` names the service that it makes way for, and takes no more actions for.
    While it is `restoring` without an action it takes none, and keeps its cells.
    """

    service: str
    cell_ids: tuple[int, ...]
    places: int
    memory_mb: int
    pinned: bool = False
    active: dict[str, None] = field(default_factory=dict)
    last_used: float = 0.0
    since: float = 0.0
    leaving: str | None = None
    restoring: bool = False

    @property
    def busy(self) -> bool:
        """Whether it cannot go now."""
        return self.restoring or bool(self.active)

    @property
    def takes(self) -> bool:
        """Whether it has a place for one more action."""
        return not self.restoring and self.leaving is None and len(self.active) < self.places

    @property
    def size(self) -> int:
        """The cells that it holds."""
        return len(self.cell_ids)

    @property
    def named(self) -> Evicted:
        """What names it for its node."""
        return Evicted(service=self.service, cell_ids=self.cell_ids)


@dataclass(frozen=True, slots=True)
class Eviction:
    """The cells for an instance and the instances to be thrown off for it."""

    cell_ids: tuple[int, ...]
    evicted: tuple[Evicted, ...]


class CellGroup(Group):
    """The GPU cells of one node."""

    def __init__(self, node: str, cells: int, cell_memory_mb: int, *, sharing: bool = False) -> None:
        self.node = node
        self.capacity = cells
        self.cell_memory_mb = cell_memory_mb
        self.sharing = sharing and cell_memory_mb < UNLIMITED
        self.instances: list[Instance] = []
        self.running: dict[str, Running] = {}
        self._on: list[list[Instance]] = [[] for _ in range(cells)]

    @property
    def free(self) -> int:
        """Cells that can be granted now: the empty ones and those of idle instances."""
        return self.capacity - len({cell for i in self.instances if i.busy or i.pinned for cell in i.cell_ids})

    @property
    def most(self) -> int:
        """Cells without a pinned instance."""
        return self.capacity - len({cell for i in self.instances if i.pinned for cell in i.cell_ids})

    @property
    def unused(self) -> int:
        """Cells without an instance."""
        return sum(not there for there in self._on)

    @property
    def idle(self) -> int:
        """Cells on which nothing computes."""
        return self.capacity - len({cell for i in self.instances if i.busy for cell in i.cell_ids})

    def on(self, cell: int) -> list[Instance]:
        """Return the instances on a cell."""
        return self._on[cell]

    def releases(self) -> Iterable[Release]:
        """Return the expected ends of the busy instances."""
        for instance in self.instances:
            ends = [self.running[action_id].expected_end for action_id in instance.active if action_id in self.running]
            if ends:
                yield Release(max(ends), len(instance.cell_ids))

    @property
    def has_room(self) -> bool:
        """Whether any action could start here: on free cells, or at a free place of a resident instance."""
        return self.free > 0 or any(instance.takes for instance in self.instances)

    def place_on(self, service: str, units: tuple[int, ...]) -> Instance | None:
        """Return a resident instance with a place free for the action: a busy one first, then the last used."""
        fitting = [i for i in self.instances if i.service == service and len(i.cell_ids) in units and i.takes]
        return max(fitting, key=lambda i: (bool(i.active), i.last_used), default=None)

    def blocked(self, instance: Instance) -> bool:
        """Say whether another instance computes on its cells."""
        return self.sharing and any(other.busy and other is not instance for cell in instance.cell_ids for other in self._on[cell])

    def full_of(self, spec: ServiceSpec) -> bool:
        """Say whether the node holds as many instances of the service as it can, none of which can go."""
        own = [i for i in self.instances if i.service == spec.name]
        return spec.instances_per_node is not None and len(own) >= spec.instances_per_node and all(i.busy or i.pinned for i in own)

    def could_serve(self, spec: ServiceSpec, units: tuple[int, ...]) -> bool:
        """Say whether the service could have an instance of one of these sizes, were all others idle and gone but the pinned ones."""
        own = [i for i in self.instances if i.service == spec.name]
        if any(i.size in units for i in own):
            return True
        if spec.instances_per_node is not None and sum(i.pinned for i in own) >= spec.instances_per_node:
            return False
        pinned = [[i for i in there if i.pinned] for there in self._on]
        left_mb = [self.cell_memory_mb - sum(i.memory_mb for i in there) for there in pinned if not any(i in own for i in there)]
        return sum(left >= self.need_mb(spec) for left in left_mb) >= units[0]

    def need_mb(self, spec: ServiceSpec) -> int:
        """Return the memory that an instance of the service takes of each of its cells."""
        return spec.memory_mb if self.sharing and spec.memory_mb else self.cell_memory_mb

    def replaceable(self, spec: ServiceSpec) -> list[Instance]:
        """Return the instances of the service of which one must go for a further one, idle ones first; none while there may be more."""
        own = [i for i in self.instances if i.service == spec.name]
        if spec.instances_per_node is None or len(own) < spec.instances_per_node:
            return []
        return sorted((i for i in own if not i.pinned), key=lambda i: (i.busy, i.last_used))

    def clearing(self, spec: ServiceSpec) -> Clearing:
        """Begin a search for cells for one more instance; one that it must replace is thrown off."""
        clearing = Clearing(self._on, self.cell_memory_mb, spec.name, self.need_mb(spec))
        for replaced in self.replaceable(spec)[:1]:
            clearing.throw_off(replaced)
        return clearing

    def others_on(self, cell_ids: Iterable[int], service: str) -> list[Instance]:
        """Return the instances of other services that are on any of these cells, each once."""
        return list(dict.fromkeys(other for cell in cell_ids for other in self._on[cell] if other.service != service))

    def bring(self, spec: ServiceSpec, cells: int) -> tuple[Instance, Eviction]:
        """Make an instance on `cells` cells, evicting idle ones until it fits, least recently used first."""
        idle = sorted((i for i in self.instances if not i.busy and not i.pinned), key=lambda i: (i.last_used, i.cell_ids))
        cleared = self.clearing(spec).clear(cells, idle, lambda victim, going: True)
        if cleared is None:
            raise ValueError(f"{cells} cells wanted on {self.node}, which has none to spare")
        return self.bring_onto(spec, cleared)

    def bring_onto(self, spec: ServiceSpec, cleared: Cleared) -> tuple[Instance, Eviction]:
        """Make an instance on cells that were found for it, and evict who is in its way."""
        for victim in cleared.victims:
            self.drop(victim)
        return self._put(spec, cleared.cell_ids), Eviction(cleared.cell_ids, tuple(victim.named for victim in cleared.victims))

    def instance_on(self, service: str, cell_ids: tuple[int, ...]) -> Instance | None:
        """Return the instance of the service on these very cells."""
        return next((i for i in self.instances if i.service == service and i.cell_ids == cell_ids), None)

    def has_room_on(self, spec: ServiceSpec, cell_ids: tuple[int, ...]) -> bool:
        """Say whether an instance could be on these very cells with nothing evicted for it, whoever computes there."""
        return all(0 <= cell < self.capacity and self._fits(spec, cell) for cell in cell_ids)

    def adopt(self, spec: ServiceSpec, cell_ids: tuple[int, ...]) -> Instance:
        """Return the instance on these very cells, noting it where it is not known yet; who is in its way is forgotten."""
        known = self.instance_on(spec.name, cell_ids)
        if known is not None:
            return known
        for cell in cell_ids:
            for other in [] if self._fits(spec, cell) else list(self._on[cell]):
                self.drop(other)
        return self._put(spec, cell_ids)

    def _fits(self, spec: ServiceSpec, cell: int) -> bool:
        taken_mb = sum(other.memory_mb for other in self._on[cell])
        alone = all(other.service != spec.name for other in self._on[cell])
        return alone and taken_mb + max(self.need_mb(spec), spec.memory_mb) <= self.cell_memory_mb

    def _put(self, spec: ServiceSpec, cell_ids: tuple[int, ...]) -> Instance:
        instance = Instance(spec.name, cell_ids, spec.max_concurrency, self.need_mb(spec), pinned=spec.pinned)
        self.instances.append(instance)
        for cell in cell_ids:
            self._on[cell].append(instance)
        return instance

    def drop(self, instance: Instance) -> None:
        """Forget an instance; what it held is free."""
        self.instances.remove(instance)
        for cell in instance.cell_ids:
            self._on[cell].remove(instance)

    def instance_of(self, action_id: str) -> Instance | None:
        """Return the instance that runs the action."""
        return next((i for i in self.instances if action_id in i.active), None)
