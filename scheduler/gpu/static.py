"""GPU cells under `static:N`: each service owns an equal share of all cells for good, and its instances are never evicted."""

from __future__ import annotations

from scheduler.core.state import Node, State
from scheduler.gpu.cells import CellGroup
from scheduler.gpu.dispatcher import CellDispatcher
from scheduler.model import Waiting
from scheduler.quotas.holds import Holds


class StaticCells(CellDispatcher):
    """Starts each action on the fastest amount that is left of its service's share."""

    def __init__(self, state: State, holds: Holds) -> None:
        super().__init__(state, holds)
        self._owned: dict[str, int] = {}

    def node_gone(self) -> None:
        """Count anew what each service owns."""
        self._owned.clear()
        for node in self._state.nodes.values():
            for instance in node.cells.instances:
                if instance.pinned:
                    self._owned[instance.service] = self._owned.get(instance.service, 0) + instance.size

    def hold_round(self, group: CellGroup, node: Node, now: float) -> None:
        """Start what can start on the cells of a node."""
        if group.has_room:
            self._start_in_order(group, node, now)
            self._take_out_started()

    def _start_in_order(self, group: CellGroup, node: Node, now: float) -> None:
        share = sum(each.cells.capacity for each in self._state.nodes.values()) // max(1, len(self._state.services))
        for waiting in self._candidates(group, node, now):
            service = waiting.action.service or ""
            instance = group.place_on(service, waiting.units)
            if instance is None:
                size = self._size(waiting, min(share - self._owned.get(service, 0), group.free))
                plan = group.plan_by_last_use(self._state.services[service], size) if size else None
                if plan is None:
                    continue
                instance = group.bring(self._state.services[service], plan)
                instance.pinned = True
                self._owned[service] = self._owned.get(service, 0) + size
            self._start(waiting, node, instance, now)

    @staticmethod
    def _size(waiting: Waiting, room: int) -> int:
        """Return the amount up to `room` on which an action is fastest; 0 where there is none."""
        sizes = [amount for amount in waiting.units if amount <= room]
        return min(sizes, key=lambda amount: (waiting.duration_s(amount), amount), default=0)
