"""Which lines need an instance, and in which order they are served.

A line *needs* an instance if it can use no resident one, or if more of its actions wait than should start soon. This number is
summed over the resident instances, within `Tuning.soon_restores` restores. Each place that falls free starts one action, and
another one each time an action has lasted its expected duration. A place on shared cells counts once, since another service may
compute on these cells next.
"""

from __future__ import annotations

from typing import Final

from scheduler.gpu.ageing import Ageing
from scheduler.gpu.round import Line, Place, Round

LEAST_S: Final = 0.01
"""Least seconds for which an action counts as lasting. Its expected duration may be 0."""


def rank(round_: Round, ageing: Ageing) -> list[Line]:
    """Return the lines in the order in which they are served.

    Starving lines come first, in the order of their turns. The next criteria are jobs within their share, higher priorities, and
    more waiting actions for each place. With more waiting actions, a restore serves more.
    """

    def order(line: Line) -> tuple[object, ...]:
        if ageing.starving(line, round_):
            return (0, ageing.turn(line))
        places = sum(instance.places for instance, _ in round_.usable(line))
        last = round_.state.deprioritised(line.first, round_.now)
        return (1, last, -line.first.action.priority, -len(line.waiting) / (places + round_.tuning.place_offset))

    return sorted((line for line in round_.lines.values() if line.waiting and line.groups), key=order)


def starts_soon(line: Line, round_: Round) -> int:
    """Return how many actions of a line should start soon on resident instances. If more wait, the line needs an instance."""
    return sum(_starts_on(place, line, round_) for place in round_.usable(line))


def _starts_on(place: Place, line: Line, round_: Round) -> int:
    """Return how many actions of a line an instance should start within `Tuning.soon_restores`."""
    instance, group = place
    now, restore_s = round_.now, line.spec.restore_s
    if not instance.busy and group.blocked(instance):
        return 1
    until = now + round_.tuning.soon_restores * restore_s
    running = round_.state.running
    if instance.restoring:
        free_at = [now + restore_s] * instance.places
    else:
        free_at = [at for action_id in instance.active if (at := max(now, running[action_id].expected_end)) <= until]
    if not free_at or (group.sharing and group.others_on(instance)):
        return len(free_at)
    each_s = max(LEAST_S, line.first.duration_s(instance.size))
    return sum(1 + int((until - at) / each_s) for at in free_at if at <= until)
