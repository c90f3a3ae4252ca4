"""Who starts now: holds a round over every group that changed.

A round takes place only where something changed: an action came, units came back, a rate opened. What it costs therefore does not
grow with the rest of the system. What an action needs decides where it waits and which dispatcher starts it:

| it needs | it waits in | dispatcher |
|---|---|---|
| cores, in an environment | the queue of its node or its pod | `scheduler/cpu` |
| cores, anywhere | `State.floating_cores` | `scheduler/cpu`, on any node of the pool `cpu` |
| cells | `State.floating_cells` | `scheduler/gpu`, on any node of the pool `gpu` |
| quotas only | the queue of the first quota | `Dispatcher`, on a node of the pool `api` |
| nothing | `State.unplaced`, while there is no node | `Dispatcher` |
"""

from __future__ import annotations

from scheduler.core.state import Node, State, own_memory
from scheduler.cpu.cores import CoreGroup
from scheduler.cpu.elastic import ElasticCores
from scheduler.cpu.in_order import Cores
from scheduler.gpu.cells import CellGroup
from scheduler.gpu.dispatcher import CellDispatcher
from scheduler.gpu.elastic import ElasticCells
from scheduler.gpu.on_demand import OnDemandCells
from scheduler.gpu.static import StaticCells
from scheduler.model import Grant, Waiting
from scheduler.policies.elastic import Elastic
from scheduler.quotas.account import QuotaState
from scheduler.quotas.holds import Holds


class Dispatcher:
    """Starts what can start, one changed group after another."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.holds = Holds(state)
        policy = state.policy
        self._cores = ElasticCores(state, self.holds, policy) if isinstance(policy, Elastic) else Cores(state, self.holds)
        self._cells = _cell_dispatcher(state, self.holds)

    def run(self, now: float) -> bool:
        """Look at the changed groups; return whether there were any."""
        dirty = self._state.dirty
        looked = bool(dirty)
        while dirty:
            group = next(iter(dirty))
            del dirty[group]
            if isinstance(group, QuotaState):
                self._quota(group, now)
                continue
            node = self._state.nodes.get(group.node)
            if node is None:
                continue
            if isinstance(group, CoreGroup):
                self._cores.run(group, node, now)
            elif group.capacity:  # else no round would ever clear the time of the next one
                self._cells.hold_round(group, node, now)
        return looked

    def came(self, waiting: Waiting, now: float) -> None:
        """Tell the lane of the cells that an action for a model has come in."""
        self._cells.arrived(waiting, now)

    def next_look(self) -> float | None:
        """Return when the cells are to be looked at again by themselves; None where nothing would change."""
        return self._cells.next_round()

    def look_again(self, now: float) -> None:
        """Have the cells looked at, if the time has come."""
        at = self._cells.next_round()
        if at is not None and at <= now:
            for node in self._state.nodes.values():
                if node.cells.capacity:
                    self._state.touch(node.cells)

    def _quota(self, quota: QuotaState, now: float) -> None:
        started = []
        for waiting in self._state.in_order([quota.queue], now):
            if self.holds.held(waiting, quota, now):
                if not self.holds.opens(quota, now):
                    break
                continue
            node = self._least_busy("api", waiting)
            if node is None:
                continue
            not_before = self.holds.take(waiting, now)
            self.start_without_units(waiting, node, now, not_before if not_before > now else 0.0)
            started.append(waiting)
        for waiting in started:  # not before: the walk must not see the queue change
            quota.queue.remove(waiting)

    def forget_node(self, node: Node) -> None:
        """Look no more at the groups of a node that has gone."""
        places: tuple[CoreGroup | CellGroup, ...] = (node.cores, node.cells)
        for place in places:
            self._state.dirty.pop(place, None)
            self.holds.forget(place)
        self._cells.node_gone()

    def _least_busy(self, pool: str, waiting: Waiting) -> Node | None:
        """Return the node of `pool` that runs the fewest actions, among those with the labels and the memory."""
        action, memory_mb = waiting.action, own_memory(waiting.action)
        nodes = [node for node in self._state.nodes.values() if node.offers(pool, action.requires) and node.memory_free >= memory_mb]
        return min(nodes, key=lambda node: len(node.running), default=None)

    def start_unplaced(self, now: float) -> None:
        """Start the actions that need nothing, wherever a node is up."""
        for waiting in list(self._state.unplaced):
            node = self._least_busy("cpu", waiting)
            if node is not None:
                self._state.unplaced.remove(waiting)
                self.start_without_units(waiting, node, now)

    def start_without_units(self, waiting: Waiting, node: Node, now: float, not_before: float = 0.0) -> None:
        """Start an action that holds no cores or cells."""
        grant = Grant(node=node.spec.name, attempt=waiting.attempt + 1, not_before=not_before)
        self._state.start(waiting, grant, now, waiting.durations_s[0])


def _cell_dispatcher(state: State, holds: Holds) -> CellDispatcher:
    """Return the dispatcher of GPU cells that the policy asks for."""
    policy = state.policy
    if policy.pod_cores():
        return StaticCells(state, holds)
    return ElasticCells(state, holds) if isinstance(policy, Elastic) and policy.services else OnDemandCells(state, holds)
