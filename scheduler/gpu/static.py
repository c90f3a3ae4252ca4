"""GPU cells under `static:N`: each service owns an equal share of all cells for good, and its instances are never evicted."""

from __future__ import annotations

from collections import Counter

from scheduler.gpu.cells import CellGroup
from scheduler.gpu.dispatcher import CellDispatcher
from scheduler.model import Waiting


class StaticCells(CellDispatcher):
    """Starts each action on the fastest amount within the rest of its service's share."""

    def _start_in_order(self, group: CellGroup, now: float) -> None:
        groups = self._pool.groups.values()
        share = sum(each.capacity for each in groups) // max(1, len(self._state.services))
        owned = Counter[str]()
        for own in (one for each in groups for one in each.instances):
            owned[own.service] += own.size
        for waiting in self._candidates(group, now):
            service = waiting.action.service or ""
            instance = group.instance_for(service, waiting.units)
            if instance is None:
                size = self._size(waiting, min(share - owned[service], group.free))
                plan = group.plan_by_last_use(self._state.services[service], size) if size else None
                if plan is None:
                    continue
                instance = group.bring(self._state.services[service], plan)
                instance.pinned = True
                owned[service] += size
            self._start(waiting, group, instance, now)

    @staticmethod
    def _size(waiting: Waiting, room: int) -> int:
        """Return the amount up to `room` on which an action is fastest; 0 if no amount is that small."""
        sizes = [amount for amount in waiting.units if amount <= room]
        return min(sizes, key=lambda amount: (waiting.duration_s(amount), amount), default=0)
