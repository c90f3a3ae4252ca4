"""What the dispatchers of GPU cells have in common: a round, and the start of an action on an instance."""

from __future__ import annotations

from collections.abc import Iterator

from scheduler.core.state import Node, State, own_memory
from scheduler.gpu.cells import CellGroup, Instance
from scheduler.gpu.placement import PlacementPlan
from scheduler.model import Grant, Waiting
from scheduler.quotas.holds import Holds


class CellDispatcher:
    """Starts waiting actions on instances, and decides which instances there are."""

    def __init__(self, state: State, holds: Holds) -> None:
        self._state = state
        self._holds = holds
        self._started: list[Waiting] = []

    def hold_round(self, group: CellGroup, node: Node, now: float) -> None:
        """Hold a round: start what can start on the cells of a node that has changed."""
        raise NotImplementedError

    def arrived(self, waiting: Waiting, now: float) -> None:
        """Take note of an action that has come in."""

    def node_gone(self) -> None:
        """Take note that a node is there no more."""

    def next_round(self) -> float | None:
        """Return when a round would change something though nothing else has happened."""
        return None

    def _candidates(self, group: CellGroup, node: Node, now: float) -> Iterator[Waiting]:
        """Walk the waiting actions that the node could run and that neither memory nor a quota keeps back."""
        for waiting in self._state.in_order([self._state.floating_cells], now):
            able = can_run(waiting, node, self._state) and own_memory(waiting.action) <= node.memory_free
            if able and not self._holds.held(waiting, group, now):
                yield waiting

    def _bring(self, waiting: Waiting, node: Node, plan: PlacementPlan, now: float) -> Instance:
        """Have an action bring an instance of its service, and start it there."""
        spec = self._state.services[waiting.action.service or ""]
        instance = node.cells.bring(spec, plan)
        instance.since = now
        self._start(waiting, node, instance, now, brought_by=plan)
        return instance

    def _start(self, waiting: Waiting, node: Node, instance: Instance, now: float, brought_by: PlacementPlan | None = None) -> None:
        self._started.append(waiting)
        instance.active[waiting.id] = None
        instance.last_used = now
        self._holds.take(waiting, now)
        grant = Grant(
            node=node.spec.name,
            attempt=waiting.attempt + 1,
            units=instance.size,
            cell_ids=instance.cell_ids,
            evict=brought_by.evicted if brought_by is not None else (),
            restore=brought_by is not None,
        )
        restore_s = self._state.services[instance.service].restore_s if brought_by is not None else 0.0
        expected_s = restore_s + waiting.duration_s(grant.units)
        node.cells.running[waiting.id] = self._state.start(waiting, grant, now, expected_s)

    def _take_out_started(self) -> None:
        """Take the started actions out of the queue. A walk over the queue must not see it change, so this comes after it."""
        for waiting in self._started:
            self._state.floating_cells.remove(waiting)
        self._started.clear()


def can_run(waiting: Waiting, node: Node, state: State) -> bool:
    """Say whether a node, were it all free, could run an action on its cells."""
    action, cells = waiting.action, node.cells
    spec = state.services.get(action.service or "")
    if spec is None or not (node.heard and node.serves(spec.name) and node.offers("gpu", action.requires)):
        return False
    return waiting.least <= cells.capacity and spec.memory_mb <= cells.cell_memory_mb and own_memory(action) <= node.spec.memory_mb
