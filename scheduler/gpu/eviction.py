"""Which instances make way for another one, and in which order.

Instances that already make way for the queue go first. The next criteria are: idle before busy, lower demand before higher, and less
recently used before more. Of its own service, a queue evicts only the instances that it cannot use or that are too large.

So an idle instance with high demand goes before a busy instance with low demand. If the busy instance is soon done, waiting may be
cheaper. Otherwise all callers of the evicted service would wait for its next restore.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.gpu.cells import CellGroup, Instance
from scheduler.gpu.placement import PlacementPlan
from scheduler.gpu.round import Round, ServiceQueue
from scheduler.gpu.tuning import TUNING


def candidates(group: CellGroup, queue: ServiceQueue, round_: Round) -> list[Instance]:
    """Return the instances that could make way for a queue once they are idle, in order."""

    def order(instance: Instance) -> tuple[object, ...]:
        return instance.evicting_for is None, instance.busy, round_.asked(instance), instance.last_used, instance.cell_ids

    def may_go(instance: Instance) -> bool:
        useful = instance.service == queue.service and instance.size in queue.units and instance.size <= queue.largest
        return not useful and not instance.pinned and instance.evicting_for in (None, queue.service)

    return sorted(filter(may_go, group.instances), key=order)


def better_later(plan: PlacementPlan, candidates: Sequence[Instance], queue: ServiceQueue, round_: Round) -> bool:
    """Say whether waiting for a busy candidate is cheaper for a queue than the evictions of a plan."""
    cost_s = sum(_restore_cost_s(instance, round_) for instance in plan.evicted)
    running = round_.state.running
    for other in candidates if plan.evicted else ():
        if other.active and other.size >= len(plan.cell_ids):
            wait_s = max(0.0, max(running[action_id].expected_end for action_id in other.active) - round_.now)
            if TUNING.wait_advantage * (wait_s * len(queue.waiting) + _restore_cost_s(other, round_)) < cost_s:
                return True
    return False


def _restore_cost_s(instance: Instance, round_: Round) -> float:
    """Return the total seconds for which later actions would wait for the next restore of an instance."""
    spec = round_.state.services.get(instance.service)
    restore_s = spec.restore_s if spec is not None else 0.0
    return round_.asked(instance) * restore_s * restore_s / 2.0
