"""GPU cells on demand, for `paper`, `fcfs`, `fixed:N` and `elastic` without `services`.

Each action that finds no place on a resident instance brings one, in the order of the queue. Idle instances are evicted for it, the
least recently used first. The policy chooses the sizes.
"""

from __future__ import annotations

from scheduler.core.state import Node, own_memory
from scheduler.gpu.cells import CellGroup, Instance
from scheduler.gpu.dispatcher import CellDispatcher
from scheduler.model import Waiting
from scheduler.policies.abstract import Choice


class OnDemandCells(CellDispatcher):
    """Starts actions on resident instances, or brings one for each."""

    def hold_round(self, group: CellGroup, node: Node, now: float) -> None:
        """Start what can start on the cells of a node."""
        if group.has_room:
            self._start_in_order(group, node, now)
            self._take_out_started()

    def _start_in_order(self, group: CellGroup, node: Node, now: float) -> None:
        bringing: list[Waiting] = []
        reserved = 0
        for waiting in self._candidates(group, node, now):
            instance = group.place_on(waiting.action.service or "", waiting.units)
            if instance is not None and _leaves(group, instance, reserved):
                self._start(waiting, node, instance, now)
                continue
            spec = self._state.services[waiting.action.service or ""]
            if group.full_of(spec) or any(other.action.service == spec.name for other in bringing if spec.instances_per_node):
                continue
            wanted = self._state.policy.wanted(waiting, group.most)
            if wanted > group.most:  # pinned instances leave no room for it, so it must not hold up those behind it
                continue
            if reserved + wanted > group.free:
                break
            bringing.append(waiting)
            reserved += wanted
        if bringing:
            for choice in self._state.policy.choose(bringing, [], group.free, group, now):
                self._carry_out(choice, group, node, now)

    def _carry_out(self, choice: Choice, group: CellGroup, node: Node, now: float) -> None:
        waiting = choice.waiting
        if own_memory(waiting.action) > node.memory_free or self._holds.held(waiting, group, now):
            return
        spec = self._state.services[waiting.action.service or ""]
        instance = group.place_on(spec.name, waiting.units)
        if instance is not None:
            self._start(waiting, node, instance, now)
            return
        plan = group.plan_by_last_use(spec, choice.units)
        if plan is not None:  # else the node may hold no more instances of the service
            self._bring(waiting, node, plan, now)


def _leaves(group: CellGroup, instance: Instance, reserved: int) -> bool:
    """Say whether enough cells are free for those that bring an instance, once this one is in use."""
    return bool(instance.active) or instance.pinned or group.free - instance.size >= reserved
