"""Which service queues need an instance, and in which order they are served.

A queue *needs* an instance if it can use no resident one, or if more of its actions wait than should start soon. This number is
summed over the resident instances, within `Tuning.soon_restores` restores. Each place that falls free starts one action, and
another one each time an action has lasted its expected duration. A place on shared cells counts once, since another service may
compute on these cells next.
"""

from __future__ import annotations

from typing import Final

from scheduler.gpu.ageing import Ageing
from scheduler.gpu.round import Resident, Round, ServiceQueue
from scheduler.gpu.tuning import TUNING

LEAST_S: Final = 0.01
"""Least seconds for which an action counts as lasting. Its expected duration may be 0."""


def rank(round_: Round, ageing: Ageing) -> list[ServiceQueue]:
    """Return the queues in the order in which they are served.

    Starving queues come first, in the order of `Ageing.precedence`. The next criteria are jobs within their share, higher priorities, and
    more waiting actions for each place. With more waiting actions, a restore serves more.
    """

    def order(queue: ServiceQueue) -> tuple[object, ...]:
        if ageing.starving(queue, round_):
            return (0, ageing.precedence(queue))
        places = sum(instance.places for instance, _ in round_.usable(queue))
        last = round_.state.deprioritised(queue.first, round_.now)
        return (1, last, -queue.first.action.priority, -len(queue.waiting) / (places + TUNING.place_offset))

    return sorted((queue for queue in round_.queues.values() if queue.waiting and queue.groups), key=order)


def starts_soon(queue: ServiceQueue, round_: Round) -> int:
    """Return how many actions of a queue should start soon on resident instances. If more wait, the queue needs an instance."""
    return sum(_starts_on(resident, queue, round_) for resident in round_.usable(queue))


def _starts_on(resident: Resident, queue: ServiceQueue, round_: Round) -> int:
    """Return how many actions of a queue an instance should start within `Tuning.soon_restores`."""
    instance, group = resident
    now, restore_s = round_.now, queue.spec.restore_s
    if not instance.busy and group.blocked(instance):
        return 1
    until = now + TUNING.soon_restores * restore_s
    running = round_.state.running
    if instance.restoring:
        free_at = [now + restore_s] * instance.places
    else:
        free_at = [at for action_id in instance.active if (at := max(now, running[action_id].expected_end)) <= until]
    if not free_at or (group.sharing and group.others_on(instance)):
        return len(free_at)
    each_s = max(LEAST_S, queue.first.duration_s(instance.size))
    return sum(1 + int((until - at) / each_s) for at in free_at if at <= until)
