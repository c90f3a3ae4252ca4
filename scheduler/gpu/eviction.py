"""Who makes way on GPU cells: the order in which instances could go, and when a better one is waited for.

Who leaves for the line already (ageing.py) goes first, then who is idle, then who is asked for least, then who was used longest
ago. So an idle instance that is often asked for goes before a busy one that hardly is. Where the latter is soon done, that may cost
more than to wait for it: those who come for the former meanwhile all wait for its restore.
"""

from __future__ import annotations

from typing import Final

from scheduler.gpu.cells import Instance
from scheduler.gpu.demand import Demands
from scheduler.gpu.lines import Line, Room
from scheduler.gpu.residents import Residents
from scheduler.state import Node, State

SURE: Final = 2.0
"""How many times as much time of others an eviction at once must cost as waiting for a better victim: both are only expected."""


class Victims:
    """Chooses among the instances that there are."""

    def __init__(self, state: State, demands: Demands, residents: Residents) -> None:
        self._state, self._demands, self._residents = state, demands, residents

    def candidates(self, node: Node, line: Line) -> list[Instance]:
        """Return the instances that could go for a line, busy or not, in their order; not those that leave for others.

        Of its own service these are the ones that are of no use to it, or larger than `Line.most`.
        """

        def order(instance: Instance) -> tuple[object, ...]:
            leaving = instance.leaving is not None
            return (not leaving, instance.busy, self._asked(instance), instance.last_used, instance.cell_ids)

        ours = (None, line.service)
        others = (i for i in node.cells.instances if i.service != line.service or i.size not in line.units or i.size > line.most)
        return sorted((i for i in others if i.leaving in ours), key=order)

    def better_later(self, line: Line, room: Room, now: float) -> bool:
        """Say whether a line had better wait for a busy instance that is hardly asked for than have those go at once that often are."""
        if not room.cleared.victims:
            return False
        at_once = sum(self._missed_s(victim) for victim in room.cleared.victims)
        size, running = len(room.cleared.cell_ids), self._state.running
        for other in self.candidates(room.node, line):
            if other.active and other.size >= size and not other.pinned:
                wait_s = max(0.0, max(running[action_id].expected_end for action_id in other.active) - now)
                if SURE * (wait_s * len(line.waiting) + self._missed_s(other)) < at_once:
                    return True
        return False

    def _missed_s(self, instance: Instance) -> float:
        """Return how long the actions that should come for an instance while it is restored would wait for that, together."""
        spec = self._state.services.get(instance.service)
        restore_s = spec.restore_s if spec is not None else 0.0
        return self._asked(instance) * restore_s * restore_s / 2.0

    def _asked(self, instance: Instance) -> float:
        return self._demands.rate(instance.service) / max(1, self._residents.count(instance.service))
