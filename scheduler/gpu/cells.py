"""The books of one node's GPU cells: the resident instances, their cells and their actions.

An *instance* is a service on a set of cells. It stays resident between actions until another instance needs the cells, and runs up to
`max_concurrency` actions at once. Where cells are shared (`CellGroup.sharing`), a cell may hold instances of several services as long
as their memory fits; only one of them computes at a time. A service that declares no memory takes whole cells. Every service takes
whole cells on a node that does not declare the memory of its cells.

| from | on | to |
|---|---|---|
| – | an action is granted cells on which its service is not resident | busy, after a restore |
| – | the node of a warm service has joined | restoring |
| restoring | the worker reports the instance as resident | idle |
| busy | its last action ended | idle |
| idle | an action of its service | busy |
| idle | another instance needs its cells | evicted |
| busy, idle | a queue of another service has aged (ageing.py) | evicting: takes no more actions, evicted once idle |
| evicting | the aged queue is served elsewhere, or is gone | busy or idle |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from scheduler.gpu.placement import Placement, PlacementPlan
from scheduler.model import UNLIMITED, Running, ServiceSpec
from scheduler.model.group import Group, Release
from scheduler.model.state import Node


@dataclass(slots=True, eq=False)
class Instance:
    """A service that has been resident on cells since `since`, with `memory_mb` on each of them.

    A `pinned` instance is never evicted. An instance with `evicting_for` takes no more actions, and makes way for the named
    service. An instance that is `restoring` without an action takes no actions yet.
    """

    service: str
    cell_ids: tuple[int, ...]
    places: int
    memory_mb: int
    pinned: bool = False
    active: dict[str, None] = field(default_factory=dict)
    last_used: float = 0.0
    since: float = 0.0
    evicting_for: str | None = None
    restoring: bool = False

    @property
    def busy(self) -> bool:
        """Whether it cannot be evicted now."""
        return self.restoring or bool(self.active)

    @property
    def takes(self) -> bool:
        """Whether it has a place for one more action."""
        return not self.restoring and self.evicting_for is None and len(self.active) < self.places

    @property
    def size(self) -> int:
        """The number of its cells."""
        return len(self.cell_ids)


class CellGroup(Group):
    """The GPU cells of one node."""

    def __init__(self, node: Node, changed: dict[CellGroup, None], *, sharing: bool = False) -> None:
        super().__init__(changed)
        self.node = node
        self.capacity = node.spec.cells
        self.cell_memory_mb = node.spec.cell_memory_mb
        self.sharing = sharing and self.cell_memory_mb < UNLIMITED
        self.instances: list[Instance] = []
        self.running: dict[str, Running] = {}
        self._on: list[list[Instance]] = [[] for _ in range(self.capacity)]

    @property
    def free(self) -> int:
        """Cells that can be granted now: empty cells and the cells of idle instances."""
        return self.capacity - len({cell for i in self.instances if i.busy or i.pinned for cell in i.cell_ids})

    @property
    def most(self) -> int:
        """Cells without a pinned instance."""
        return self.capacity - len({cell for i in self.instances if i.pinned for cell in i.cell_ids})

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
                yield Release(max(ends), instance.size)

    @property
    def has_room(self) -> bool:
        """Whether any action could start here: on free cells, or at a free place of a resident instance."""
        return self.free > 0 or any(instance.takes for instance in self.instances)

    def instance_for(self, service: str, units: tuple[int, ...]) -> Instance | None:
        """Return a resident instance with a free place for the action: first a busy instance, then the last used."""
        fitting = [i for i in self.instances if i.service == service and i.size in units and i.takes]
        return max(fitting, key=lambda i: (bool(i.active), i.last_used), default=None)

    def blocked(self, instance: Instance) -> bool:
        """Say whether another instance computes on its cells."""
        return self.sharing and any(other.busy and other is not instance for cell in instance.cell_ids for other in self._on[cell])

    def others_on(self, instance: Instance) -> list[Instance]:
        """Return the other instances on its cells, each once."""
        return list(dict.fromkeys(other for cell in instance.cell_ids for other in self._on[cell] if other is not instance))

    def full_of(self, spec: ServiceSpec) -> bool:
        """Say whether the node holds its most instances of the service, and can evict none of them."""
        own = [i for i in self.instances if i.service == spec.name]
        return spec.instances_per_node is not None and len(own) >= spec.instances_per_node and all(i.busy or i.pinned for i in own)

    def need_mb(self, spec: ServiceSpec) -> int:
        """Return the memory that an instance of the service takes of each of its cells."""
        return spec.memory_mb if self.sharing and spec.memory_mb else self.cell_memory_mb

    def plan(self, spec: ServiceSpec, cells: int, candidates: Sequence[Instance]) -> PlacementPlan | None:
        """Find cells for one more instance; return None if no cells have room even with all `candidates` evicted.

        Where the node holds as many instances of the service as it may, the first candidate of this service is replaced.
        """
        placement = Placement(self._on, self.cell_memory_mb, spec.name, self.need_mb(spec))
        own = [i for i in self.instances if i.service == spec.name]
        if spec.instances_per_node is not None and len(own) >= spec.instances_per_node:
            replaced = next((i for i in candidates if i.service == spec.name), None)
            if replaced is None:
                return None
            placement.replace(replaced)
        return placement.plan(cells, candidates)

    def plan_by_last_use(self, spec: ServiceSpec, cells: int) -> PlacementPlan | None:
        """Find cells for one more instance; idle instances are evicted until it fits, the least recently used first."""
        idle = (i for i in self.instances if not i.busy and not i.pinned)
        return self.plan(spec, cells, sorted(idle, key=lambda i: (i.last_used, i.cell_ids)))

    def bring(self, spec: ServiceSpec, plan: PlacementPlan) -> Instance:
        """Carry a plan out: forget the evicted instances, and add the planned instance."""
        for instance in plan.evicted:
            self.drop(instance)
        return self._put(spec, plan.cell_ids)

    def instance_on(self, service: str, cell_ids: tuple[int, ...]) -> Instance | None:
        """Return the instance of the service on exactly these cells."""
        return next((i for i in self.instances if i.service == service and i.cell_ids == cell_ids), None)

    def has_room_on(self, spec: ServiceSpec, cell_ids: tuple[int, ...]) -> bool:
        """Say whether an instance could be on exactly these cells with nothing evicted for it."""
        return all(0 <= cell < self.capacity and self._fits(spec, cell) for cell in cell_ids)

    def adopt(self, spec: ServiceSpec, cell_ids: tuple[int, ...]) -> Instance:
        """Return the instance on exactly these cells.

        If it is not known yet, note the instance and forget the instances in its way.
        """
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
        """Forget an instance; its cells are free."""
        self.instances.remove(instance)
        for cell in instance.cell_ids:
            self._on[cell].remove(instance)

    def instance_of(self, action_id: str) -> Instance | None:
        """Return the instance that runs the action."""
        return next((i for i in self.instances if action_id in i.active), None)
