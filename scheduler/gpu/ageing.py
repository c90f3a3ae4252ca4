"""Overdue: who has waited for too long for a service that is nowhere, and how room is made for it. Rule 8 of elastic.py.

What the other rules prefer may come without end: actions that find their service resident, lines with more waiting, jobs within
their share. So for whom that has kept out for long it counts no more:

1. *Who.* A line is overdue once the first of it has waited for `OVERDUE_S` and it is shut out: no node has an instance that it could
   use, but such as are idle on cells on which others compute.
2. *Turns.* Overdue lines come before all others, in the order of the time since which they have waited for their turn: since the first
   of them came, or since they were last brought an instance. Before them come the lines for whose service instances leave.
3. *A node to itself.* An overdue line that is brought nothing claims a node that could serve it: the one where instances leave for its
   service; else, unless a quota keeps it back, the first on which enough can be closed; else, until turns end, the one where most cells
   would do. Nothing is brought there for lines of other services.
4. *Leaving.* Instances that are idle, or have been there for a turn (`TURN_S`), are closed, in the order of eviction.py and no more of
   them than give room for the least amount of the line: they take no more actions, and are evicted once idle. Where the service is
   resident and only waits for its cells, the others on these are closed, and it starts there once they are idle.
5. *Open again.* When nobody is overdue any more for whom an instance leaves, it takes actions again.

The bound that follows (`bound_s`): an action waits for a service that is nowhere, because others are preferred, at most
`OVERDUE_S`, the time until somebody looks (`LOOK_S`), and one turn and the longest time that an action holds cells for itself and
for each line that is overdue before it: they have their turns one after the other. Where its service is resident it waits as in any
queue. Kept back by a quota, by memory, or by `instances_per_node`, it waits longer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

from scheduler.gpu.cells import Instance
from scheduler.gpu.eviction import Victims
from scheduler.gpu.lines import Line
from scheduler.gpu.residents import Residents
from scheduler.holds import Holds
from scheduler.state import Node, State, own_memory

LOOK_S: Final = 1.0
"""Seconds between two looks at the cells while somebody who waits may still grow impatient or overdue."""

OVERDUE_S: Final = 15.0
"""Seconds after which an action whose service is nowhere goes before all others."""

TURN_S: Final = 5.0
"""Seconds that an instance stays at least before it is closed for an overdue action."""


def bound_s(place: int, longest_s: float) -> float:
    """Return how long the `place`-th overdue line waits at most, from 1, where no action holds cells for longer than `longest_s`."""
    return OVERDUE_S + LOOK_S + place * (TURN_S + longest_s)


class Overdue:
    """Says who is overdue, and closes instances for them; remembers who was brought one when."""

    def __init__(self, state: State, holds: Holds, residents: Residents, victims: Victims) -> None:
        self._state, self._holds = state, holds
        self._residents, self._victims = residents, victims
        self._brought: dict[tuple[str, tuple[int, ...]], float] = {}
        self._turn_ends = math.inf

    def of(self, lines: Iterable[Line], now: float) -> list[Line]:
        """Return the overdue lines, in the order of their turns."""
        leaving_for = {i.leaving for node in self._state.nodes.values() for i in node.cells.instances}  # only asked for membership
        # For whom instances leave has claimed a node until they are gone: two that each wait for the other's would never end.
        overdue = (line for line in lines if self._is_overdue(line, now))
        return sorted(overdue, key=lambda line: (line.service not in leaving_for, self._since(line)))

    def claim(self, line: Line, now: float) -> Node | None:
        """Return the node that an overdue line has to itself until there is room, and close instances there; None where it needs none."""
        if not line.waiting or not self._shut_out(line):
            return None
        own = own_memory(line.waiting[0].action)
        able = [node for node in line.nodes if node.memory_free >= own and node.cells.could_serve(line.spec, line.units)]
        for node in able:
            if any(instance.leaving == line.service for instance in node.cells.instances):
                return node
        if not able or self._holds.held(line.waiting[0], able[0].cells, now):
            return None
        return self._close_on_one(able, line, now)

    def bring(self, line: Line, now: float) -> None:
        """Take note that a line is about to be brought an instance."""
        if self._is_overdue(line, now):  # what it kept others off may be elsewhere
            for node in self._state.nodes.values():
                self._state.touch(node.cells)
        self._brought[line.service, line.units] = now

    def open_again(self, nodes: Iterable[Node], lines: Sequence[Line], now: float) -> bool:
        """Have instances stay for which nobody is overdue any more; say whether there are any."""
        opened = False
        for node in nodes:
            for instance in node.cells.instances:
                if instance.leaving is not None and not self._waited_for(instance.leaving, node, lines, now):
                    instance.leaving = None
                    opened = True
        if opened:
            self._residents.note()
        return opened

    def next_turn_end(self) -> float:
        """Return when the first turn ends that this look has found somebody to wait for; the next look finds its own."""
        ends, self._turn_ends = self._turn_ends, math.inf
        return ends

    def _waited_for(self, service: str, node: Node, lines: Iterable[Line], now: float) -> bool:
        """Say whether somebody is overdue whom what leaves a node for a service makes room for."""
        concerned = (line for line in lines if line.service == service and node in line.nodes)
        return any(self._is_overdue(line, now) and node.cells.could_serve(line.spec, line.units) for line in concerned)

    def _is_overdue(self, line: Line, now: float) -> bool:
        return now - line.since >= OVERDUE_S and self._shut_out(line)

    def _shut_out(self, line: Line) -> bool:
        """Say whether a line's service is nowhere, or only where others compute."""
        return all(self._residents.blocked(instance) for instance in self._residents.usable(line.service, line.units))

    def _since(self, line: Line) -> float:
        """Return since when a line waits for its turn: who has had one comes after those that have not, though it came before them."""
        return max(line.since, self._brought.get((line.service, line.units), -math.inf))

    def _close_on_one(self, able: Sequence[Node], line: Line, now: float) -> Node:
        """Close instances on the first node where that makes room; return it, or else the one with most cells free for the line."""
        best, most = able[0], -1
        for node in able:
            closing = self._closing(node, line, now)
            if not isinstance(closing, int):
                for instance in closing:
                    instance.leaving = line.service
                self._residents.note()
                return node
            if closing > most:
                best, most = node, closing
        return best

    def _closing(self, node: Node, line: Line, now: float) -> list[Instance] | int:
        """Return who must take no more actions for a line to have room on a node; the cells free for it where some may still stay."""
        group = node.cells
        for own in group.instances:
            if own.service == line.service and own.size in line.units:
                others = group.others_on(own.cell_ids, line.service)
                if self._had_their_turn(others, now):
                    return others
        replaced = group.replaceable(line.spec)[:1]
        if any(instance.size in line.units for instance in replaced):  # it need not go: it is waited for
            return replaced[0].size
        if not self._had_their_turn(replaced, now):
            return 0
        clearing = group.clearing(line.spec)
        candidates = self._victims.candidates(node, line)
        cleared = clearing.clear(line.units[0], candidates, lambda victim, going: self._had_its_turn(victim, now))
        if cleared is None:
            return len(clearing.room())
        return [*replaced, *group.others_on(cleared.cell_ids, line.service)]

    def _had_their_turn(self, instances: Iterable[Instance], now: float) -> bool:
        return all([self._had_its_turn(instance, now) for instance in instances])  # a list: each is to say when its turn ends

    def _had_its_turn(self, instance: Instance, now: float) -> bool:
        """Say whether an instance may be closed; if not, the cells are looked at again when it may."""
        turn_ends = instance.since + TURN_S
        if instance.busy and now < turn_ends:
            self._turn_ends = min(self._turn_ends, turn_ends)
            return False
        return True
