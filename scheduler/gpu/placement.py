"""The cells for an instance, and the instances to evict for it: only as many as the memory requires.

1. A cell is usable if nothing computes on it, it holds no other instance of the service, and it has enough memory left.
2. Where too few cells are usable, candidates are evicted in their order, each only if it is in the way of a cell.
3. The usable cells with the fewest remaining instances are taken, as aligned blocks (aligned.py).
4. Finally, the candidates that turned out not to be in the way are spared, the last first.

`pinned` instances are in the way only while they compute: their memory is never given to others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scheduler.gpu.aligned import take
from scheduler.model import Evicted

if TYPE_CHECKING:
    from scheduler.gpu.cells import Instance


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """Cells for an instance, ascending, and the instances to evict for it, in order."""

    cell_ids: tuple[int, ...]
    evicted: tuple[Instance, ...]

    @property
    def evictions(self) -> tuple[Evicted, ...]:
        """The names of the evicted instances, as a grant carries them."""
        return tuple(Evicted(service=instance.service, cell_ids=instance.cell_ids) for instance in self.evicted)


class Placement:
    """One search on the cells of a node, which have `cell_mb` of memory and the instances `on` them, for an instance of a service."""

    def __init__(self, on: Sequence[Sequence[Instance]], cell_mb: int, service: str, need_mb: int) -> None:
        self._on = on
        self._service = service
        self._need_mb = need_mb
        self._left_mb = [cell_mb - sum(one.memory_mb for one in there) for there in on]
        self._obstacles = [sum(self._obstructs(one) for one in there) for there in on]
        self._evicted: list[Instance] = []
        self._replaced: Instance | None = None

    def replace(self, instance: Instance) -> None:
        """Evict an instance whether or not it is in the way."""
        self._replaced = instance
        self._evict(instance)

    def plan(self, count: int, candidates: Iterable[Instance]) -> PlacementPlan | None:
        """Return `count` cells and the instances to evict; None if all candidates together do not make room."""
        for candidate in candidates:
            if len(self._usable()) >= count:
                break
            if candidate is not self._replaced and any(self._in_the_way(candidate, cell) for cell in candidate.cell_ids):
                self._evict(candidate)
        if len(self._usable()) < count:
            return None
        cell_ids = take(self._emptiest(count), count)
        for instance in reversed(self._evicted):
            if instance is not self._replaced:
                self._spare(instance, cell_ids)
        return PlacementPlan(cell_ids, tuple(self._evicted))

    def _usable(self) -> list[int]:
        return [cell for cell in range(len(self._on)) if self._is_usable(cell)]

    def _is_usable(self, cell: int) -> bool:
        return not self._obstacles[cell] and self._left_mb[cell] >= self._need_mb

    def _obstructs(self, instance: Instance) -> bool:
        return instance.busy or instance.service == self._service

    def _in_the_way(self, instance: Instance, cell: int) -> bool:
        return self._obstructs(instance) or self._left_mb[cell] < self._need_mb

    def _evict(self, instance: Instance) -> None:
        self._evicted.append(instance)
        self._count(instance, -1)

    def _spare(self, instance: Instance, cell_ids: Sequence[int]) -> None:
        """Spare an instance if the cells are usable even with it."""
        self._count(instance, 1)
        if all(self._is_usable(cell) for cell in cell_ids):
            self._evicted = [one for one in self._evicted if one is not instance]
        else:
            self._count(instance, -1)

    def _count(self, instance: Instance, sign: int) -> None:
        for cell in instance.cell_ids:
            self._left_mb[cell] -= sign * instance.memory_mb
            self._obstacles[cell] += sign * self._obstructs(instance)

    def _emptiest(self, count: int) -> list[int]:
        """Return the usable cells with the fewest instances left on them, at least `count`, ascending."""
        left = {cell: sum(one not in self._evicted for one in self._on[cell]) for cell in self._usable()}
        most = sorted(left.values())[count - 1]
        return [cell for cell, instances in left.items() if instances <= most]
