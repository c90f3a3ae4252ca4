"""The base of the dispatchers of GPU cells: rounds, and the start of an action on an instance."""

from __future__ import annotations

from collections.abc import Iterator

from scheduler.gpu.cells import CellGroup, Instance
from scheduler.gpu.placement import PlacementPlan
from scheduler.gpu.pool import GpuPool, can_run
from scheduler.model import Grant, Waiting
from scheduler.model.state import own_memory


class CellDispatcher:
    """Starts waiting actions on instances, and decides which instances there are."""

    def __init__(self, pool: GpuPool) -> None:
        self._pool = pool
        self._state = pool.state
        self._started: list[Waiting] = []

    def hold_rounds(self, groups: list[CellGroup], now: float) -> None:
        """Start actions on the cells of changed nodes."""
        for group in groups if len(self._pool.queue) else ():
            if group.has_room:
                self._start_in_order(group, now)
                self._take_out_started()

    def _start_in_order(self, group: CellGroup, now: float) -> None:
        raise NotImplementedError

    def arrived(self, waiting: Waiting, now: float) -> None:
        """Take note of an action that has come in."""

    def node_gone(self) -> None:
        """Note that a node is gone."""

    def next_round(self) -> float | None:
        """Return when time alone makes a round necessary."""
        return None

    def _candidates(self, group: CellGroup, now: float) -> Iterator[Waiting]:
        """Walk the waiting actions that the node could run and that neither memory nor a quota keeps back."""
        for waiting in self._state.in_order([self._pool.queue], now):
            able = can_run(waiting, group, self._state) and own_memory(waiting.action) <= group.node.memory_free
            if able and not self._pool.quotas.keeps_back(waiting, group, now):
                yield waiting

    def _bring(self, waiting: Waiting, group: CellGroup, plan: PlacementPlan, now: float) -> Instance:
        """Bring an instance of an action's service, and start the action on the instance."""
        spec = self._state.services[waiting.action.service or ""]
        instance = group.bring(spec, plan)
        instance.since = now
        self._start(waiting, group, instance, now, brought_by=plan)
        return instance

    def _start(self, waiting: Waiting, group: CellGroup, instance: Instance, now: float, brought_by: PlacementPlan | None = None) -> None:
        self._started.append(waiting)
        instance.active[waiting.id] = None
        instance.last_used = now
        self._pool.quotas.take(waiting, now)
        grant = Grant(
            node=group.node.spec.name,
            attempt=waiting.attempt + 1,
            units=instance.size,
            cell_ids=instance.cell_ids,
            evict=brought_by.evictions if brought_by is not None else (),
            restore=brought_by is not None,
        )
        restore_s = self._state.services[instance.service].restore_s if brought_by is not None else 0.0
        expected_s = restore_s + waiting.duration_s(grant.units)
        group.running[waiting.id] = self._pool.start(waiting, grant, now, expected_s)

    def _take_out_started(self) -> None:
        """Take the started actions out of the queue. Call this after a walk: the queue must not change during the walk."""
        for waiting in self._started:
            self._pool.queue.remove(waiting)
        self._started.clear()
