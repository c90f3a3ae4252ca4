"""GPU cells and the services that are resident on them.

An *instance* is a service on a set of cells; it keeps them between actions until the cells are needed
(evict-on-execution), and runs up to `max_concurrency` actions at once. One instance per set of cells.

| from | on | to |
|---|---|---|
| – | action without a place on a resident instance | busy, after a restore |
| busy | last action ended | idle, still resident |
| idle | action of its service | busy |
| idle | cells needed by another instance | evicted: least recently used first, or as lanes/services.py says |
| busy, idle | an overdue action of a service that is nowhere (lanes/services.py) | leaving: takes no more actions, evicted once idle |
| leaving | the overdue action is gone, or its service is there | busy or idle |
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from scheduler.model import Running, ServiceSpec
from scheduler.policies.abstract import Group, Release
from scheduler.resources.chunks import take


@dataclass(slots=True, eq=False)
class Instance:
    """A service resident on cells since `since`.

    `pinned` instances are never evicted. `leaving` names the service that it makes way for, and takes no more actions for.
    """

    service: str
    cell_ids: tuple[int, ...]
    places: int
    pinned: bool = False
    active: dict[str, None] = field(default_factory=dict)
    last_used: float = 0.0
    since: float = 0.0
    leaving: str | None = None

    @property
    def size(self) -> int:
        """The cells that it holds."""
        return len(self.cell_ids)


@dataclass(frozen=True, slots=True)
class Eviction:
    """The cells for an instance and the services to be thrown off for it."""

    cell_ids: tuple[int, ...]
    services: tuple[str, ...]


class CellGroup(Group):
    """The GPU cells of one node."""

    def __init__(self, node: str, cells: int, cell_memory_mb: int) -> None:
        self.node = node
        self.capacity = cells
        self.cell_memory_mb = cell_memory_mb
        self.instances: list[Instance] = []
        self.running: dict[str, Running] = {}
        self._free = list(range(cells))

    @property
    def free(self) -> int:
        """Cells that can be granted now: the empty ones and those of idle instances."""
        return len(self._free) + sum(len(i.cell_ids) for i in self.instances if not i.active and not i.pinned)

    @property
    def unused(self) -> int:
        """Cells without an instance."""
        return len(self._free)

    def releases(self) -> Iterable[Release]:
        """Return the expected ends of the busy instances."""
        for instance in self.instances:
            ends = [self.running[action_id].expected_end for action_id in instance.active if action_id in self.running]
            if ends:
                yield Release(max(ends), len(instance.cell_ids))

    @property
    def has_room(self) -> bool:
        """Whether any action could start here: on free cells, or at a free place of a resident instance."""
        return self.free > 0 or any(len(instance.active) < instance.places for instance in self.instances)

    def place_on(self, service: str, units: tuple[int, ...]) -> Instance | None:
        """Return a resident instance with a place free for the action: a busy one first, then the last used."""
        fitting = [i for i in self.instances if i.service == service and len(i.cell_ids) in units and len(i.active) < i.places]
        return max(fitting, key=lambda i: (bool(i.active), i.last_used), default=None)

    def full_of(self, spec: ServiceSpec) -> bool:
        """Say whether the node holds as many instances of the service as it can, all of them busy."""
        own = [i for i in self.instances if i.service == spec.name]
        return spec.instances_per_node is not None and len(own) >= spec.instances_per_node and all(i.active for i in own)

    def bring(self, spec: ServiceSpec, cells: int, victims: Sequence[Instance] | None = None) -> tuple[Instance, Eviction]:
        """Make an instance on `cells` cells, evicting idle ones of `victims` in their order until it fits.

        By default those are all idle ones, least recently used first.
        """
        evicted = []
        own = [i for i in self.instances if i.service == spec.name]
        if spec.instances_per_node is not None and len(own) >= spec.instances_per_node:
            replaced = min((i for i in own if not i.active), key=lambda i: i.last_used)
            self.drop(replaced)
            evicted.append(replaced.service)
        if victims is None:
            idle = [i for i in self.instances if not i.active and not i.pinned]
            victims = sorted(idle, key=lambda i: (i.last_used, i.cell_ids))
        room = list(self._free)
        going = []
        for victim in victims:
            if len(room) >= cells:
                break
            if victim not in self.instances:
                continue  # it was the one to be replaced
            going.append(victim)
            room += victim.cell_ids
        if len(room) < cells:
            raise ValueError(f"{cells} cells wanted on {self.node}, which has none to spare")
        for victim in going:
            self.drop(victim)
            evicted.append(victim.service)
        cell_ids = take(self._free, cells)
        self._free = [cell for cell in self._free if cell not in cell_ids]
        instance = Instance(spec.name, cell_ids, spec.max_concurrency)
        self.instances.append(instance)
        return instance, Eviction(cell_ids, tuple(evicted))

    def adopt(self, spec: ServiceSpec, cell_ids: tuple[int, ...]) -> Instance:
        """Return the instance on these very cells, noting it where it is not known yet."""
        for instance in self.instances:
            if instance.cell_ids == cell_ids and instance.service == spec.name:
                return instance
        for instance in [i for i in self.instances if set(i.cell_ids) & set(cell_ids)]:
            self.drop(instance)
        instance = Instance(spec.name, cell_ids, spec.max_concurrency)
        self._free = [cell for cell in self._free if cell not in cell_ids]
        self.instances.append(instance)
        return instance

    def drop(self, instance: Instance) -> None:
        """Forget an instance; its cells are free."""
        self.instances.remove(instance)
        for cell in instance.cell_ids:
            insort(self._free, cell)

    def instance_of(self, action_id: str) -> Instance | None:
        """Return the instance that runs the action."""
        return next((i for i in self.instances if action_id in i.active), None)
