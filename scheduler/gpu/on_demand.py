"""GPU cells on demand, for `paper`, `fcfs`, `fixed:N` and `elastic` without `services`.

Each action that finds no place on a resident instance brings a new instance, in the order of the queue. Idle instances are evicted
for it, the least recently used first. A chooser says on how many cells each action runs.
"""

from __future__ import annotations

from scheduler.choosing.abstract import Choice, Chooser
from scheduler.gpu.cells import CellGroup, Instance
from scheduler.gpu.dispatcher import CellDispatcher
from scheduler.gpu.pool import GpuPool
from scheduler.model import Waiting
from scheduler.model.state import own_memory


class OnDemandCells(CellDispatcher):
    """Starts actions on resident instances, or brings one for each."""

    def __init__(self, pool: GpuPool, chooser: Chooser) -> None:
        super().__init__(pool)
        self._chooser = chooser

    def _start_in_order(self, group: CellGroup, now: float) -> None:
        bringing: list[Waiting] = []
        reserved = 0
        for waiting in self._candidates(group, now):
            instance = group.instance_for(waiting.action.service or "", waiting.units)
            if instance is not None and _leaves(group, instance, reserved):
                self._start(waiting, group, instance, now)
                continue
            spec = self._state.services[waiting.action.service or ""]
            if group.full_of(spec) or any(other.action.service == spec.name for other in bringing if spec.instances_per_node):
                continue
            wanted = self._chooser.wanted(waiting, group.most)
            if wanted > group.most:  # pinned instances leave no room for it, so it must not hold up later actions
                continue
            if reserved + wanted > group.free:
                break
            bringing.append(waiting)
            reserved += wanted
        if bringing:
            for choice in self._chooser.choose(bringing, [], group.free, group, now):
                self._carry_out(choice, group, now)

    def _carry_out(self, choice: Choice, group: CellGroup, now: float) -> None:
        waiting = choice.waiting
        if own_memory(waiting.action) > group.node.memory_free or self._pool.quotas.keeps_back(waiting, group, now):
            return
        spec = self._state.services[waiting.action.service or ""]
        instance = group.instance_for(spec.name, waiting.units)
        if instance is not None:
            self._start(waiting, group, instance, now)
            return
        plan = group.plan_by_last_use(spec, choice.units)
        if plan is not None:  # else the node may hold no more instances of the service
            self._bring(waiting, group, plan, now)


def _leaves(group: CellGroup, instance: Instance, reserved: int) -> bool:
    """Say whether `reserved` cells stay free once this instance is in use."""
    return bool(instance.active) or instance.pinned or group.free - instance.size >= reserved
