"""Which cells an instance goes onto, and who is evicted for it: no more than the memory requires.

1. An instance can go onto a cell on which nothing computes, no other instance of its service is, and as much memory is left as
   it takes. Instances of several services may be on a cell as long as their memory fits; one of them computes at a time.
2. Where that is too few cells, candidates are thrown off in their order, each only where it is in the way: until there are enough.
3. Of the cells that will do, those with fewest instances left on them are taken, as chunks (`chunks.take`).
4. Who turns out not to be in the way on those cells stays, the last candidates first.

`pinned` instances are in the way of others only while they compute: what they hold of the memory is theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scheduler.gpu.aligned import take

if TYPE_CHECKING:
    from scheduler.gpu.cells import Instance

Spare = Callable[["Instance", Sequence["Instance"]], bool]
"""Says whether an instance may be thrown off, besides those that are already."""


@dataclass(frozen=True, slots=True)
class Cleared:
    """Cells for an instance, ascending, and who is thrown off for it, in order."""

    cell_ids: tuple[int, ...]
    victims: list[Instance]


class Clearing:
    """One search on the cells of a node: `on[cell]` are the instances there, each cell has `whole_mb`, the newcomer takes `need_mb`."""

    def __init__(self, on: Sequence[Sequence[Instance]], whole_mb: int, service: str, need_mb: int) -> None:
        self._on = on
        self._service = service
        self._need_mb = need_mb
        self._left_mb = [whole_mb - sum(one.memory_mb for one in there) for there in on]
        self._obstacles = [sum(self._obstructs(one) for one in there) for there in on]
        self._going: list[Instance] = []

    def room(self) -> list[int]:
        """Return the cells that would do now, ascending."""
        return [cell for cell in range(len(self._on)) if self._will_do(cell)]

    def throw_off(self, victim: Instance) -> None:
        """Go on as if an instance were gone."""
        self._going.append(victim)
        self._change(victim, 1)

    def clear(self, count: int, candidates: Iterable[Instance], spare: Spare) -> Cleared | None:
        """Return where the newcomer goes with `count` cells; None where it cannot. What was thrown off before stays so."""
        must = len(self._going)
        room = len(self.room())
        for candidate in candidates:
            if room >= count:
                break
            if candidate not in self._going and any(self._in_the_way(candidate, cell) for cell in candidate.cell_ids):
                if not spare(candidate, self._going):
                    continue
                self.throw_off(candidate)
                room = len(self.room())
        if room < count:
            return None
        cell_ids = take(self._emptiest(count), count)
        for victim in self._going[: must - 1 if must else None : -1]:
            self._change(victim, -1)
            if all(self._will_do(cell) for cell in cell_ids):
                self._going.remove(victim)
            else:
                self._change(victim, 1)
        return Cleared(cell_ids, list(self._going))

    def _obstructs(self, instance: Instance) -> bool:
        return instance.busy or instance.service == self._service

    def _will_do(self, cell: int) -> bool:
        return not self._obstacles[cell] and self._left_mb[cell] >= self._need_mb

    def _in_the_way(self, instance: Instance, cell: int) -> bool:
        return self._obstructs(instance) or (not instance.pinned and self._left_mb[cell] < self._need_mb)

    def _change(self, victim: Instance, sign: int) -> None:
        for cell in victim.cell_ids:
            self._left_mb[cell] += 0 if victim.pinned else sign * victim.memory_mb
            self._obstacles[cell] -= sign * self._obstructs(victim)

    def _emptiest(self, count: int) -> list[int]:
        """Return the cells that would do with fewest instances left on them, at least `count`, ascending."""
        room = self.room()
        left = {cell: sum(one not in self._going for one in self._on[cell]) for cell in room}
        most = sorted(left.values())[count - 1]
        return [cell for cell in room if left[cell] <= most]
