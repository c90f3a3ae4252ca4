"""Who deserves that an instance is brought for it, and who comes first: rules 3, 4 and 7 of elastic.py.

A line deserves one where no node has an instance that it could use; where more of it wait than should find a place soon; and where its
first has waited for long, whatever should fall free soon. What should find a place is counted: each place that is expected to be
free within `SOON` restores is one, and one more for each action that it could run after that within this time. On cells that other
services are on too a place counts once, for the next turn may be theirs; and where they compute now, so does the whole instance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from scheduler.gpu.cells import Instance
from scheduler.gpu.lines import Line
from scheduler.gpu.residents import Residents
from scheduler.model import ServiceSpec
from scheduler.state import State

SOON: Final = 2.0
"""Restores of a service that its actions rather wait for a place than have another instance brought."""

PATIENCE_RESTORES: Final = 4.0
PATIENCE_S: Final = 10.0
"""Restores of its service, and seconds at most, that an action waits beside idle cells for a place that should fall free."""

LEAST_S: Final = 0.01
"""What an action is taken to last at least, where its turns on an instance are counted."""

NO_PLACE: Final = 0.5
"""What is added to the places of each line, so that those without any compare: one that waits for none counts as three for one place."""


def impatient(spec: ServiceSpec, since: float, now: float) -> bool:
    """Say whether an action that waits since then has waited beside idle cells for long enough."""
    return now - since >= min(PATIENCE_S, PATIENCE_RESTORES * spec.restore_s)


class Need:
    """Compares what waits with the instances that there are."""

    def __init__(self, state: State, residents: Residents) -> None:
        self._state, self._residents = state, residents

    def deserves(self, line: Line, now: float) -> bool:
        """Say whether a line deserves one more instance."""
        if impatient(line.spec, line.since, now):
            return True
        usable = self._residents.usable(line.service, line.units)
        return not usable or len(line.waiting) > sum(self._turns_soon(instance, line, now) for instance in usable)

    def in_order(self, lines: Sequence[Line], now: float) -> list[Line]:
        """Return lines in the order in which they are brought instances."""

        def need(line: Line) -> tuple[bool, int, float]:
            first = line.waiting[0]
            places = sum(instance.places for instance in self._residents.usable(line.service, line.units))
            return self._state.comes_last(first, now), -first.action.priority, -len(line.waiting) / (places + NO_PLACE)

        return sorted(lines, key=need) if len(lines) > 1 else list(lines)

    def _turns_soon(self, instance: Instance, line: Line, now: float) -> int:
        """Count how many of a line should find a place on an instance within `SOON` restores, one after the other."""
        if self._residents.blocked(instance):
            return 1
        soon = now + SOON * line.spec.restore_s
        if instance.restoring:
            free_at = [now + line.spec.restore_s] * instance.places
        else:
            free_at = [max(now, self._state.running[action_id].expected_end) for action_id in instance.active]
        # Where another service is on its cells, that may have the next turn.
        each_s = math.inf if self._residents.has_company(instance) else max(LEAST_S, line.waiting[0].duration_s(instance.size))
        return sum(1 + int((soon - at) / each_s) for at in free_at if at <= soon)
