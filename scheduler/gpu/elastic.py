"""GPU cells under `elastic`: what waits for a service shares a swap, and cells are as many or as few to an instance as the load allows.

Restoring a model costs about as much as an action, and blocks cells that serve nobody meanwhile. So an action is not brought an
instance because it is the next, but because its service deserves one:

1. *Resident first.* Waiting actions start in the order of the queue (`State.in_order`: priorities, shares) wherever an
   instance of their service has a place for them: on the largest one, of these on a busy one, else on the one used last. Those
   of jobs beyond their share start on no idle one while others are owed cells (starvation.py).
2. *Lines.* What is left stands in lines of actions that are alike: same service, amounts, labels and memory (lines.py).
3. *Swap.* A line has an instance brought where no node has one that it could use, or where more wait than should find a place within
   `SOON` restores (ranking.py). As many of the line start on it as it has places.
4. *Order.* Jobs within their share come first, then priorities, then the lines with most waiting for each place that they have:
   there a restore serves most (ranking.py).
5. *Size.* What is brought is as large as sizing.py says, by all that is on hand for the cells that the line could use (backlog.py): with
   few actions about, idle cells are best used by one that is there. It is smaller where fewer cells are idle: what waits for larger ones
   wastes those that it has.
6. *Victims.* An instance goes on unused cells, then on those of idle instances, least asked for first, then least recently used. Where
   actions that should come for these would wait for long, and a busy one that is hardly asked for is done soon, it waits for that
   (eviction.py).
7. *Patience.* An action that has waited for `PATIENCE_RESTORES` restores of its service, at most `PATIENCE_S` (ranking.py), is brought
   an instance, however soon a place should fall free: no such action waits beside idle cells that would do for it, but for rule 8.
   Then idle instances of its own that are too large for the load (rule 5) are victims too, and it starts on them only if they
   cannot go.
8. *Overdue.* An action that has waited for `OVERDUE_S`, and could use no instance on any node, goes before all others: it has a node
   to itself, where instances that have had their turn make way for it. That bounds how long an action waits for a service that is
   nowhere, because others are preferred (ageing.py).

In a look, first starts what has a place (1); then the overdue lines are brought theirs, then the others (2 to 8); and instances that
were kept idle to make way for others, but had not to, are used after all.

What this does not do: plan which service should hold how many cells, or restore one on a guess that it will be asked for;
docs/scheduling.md says what that earned. A swap is part of a grant. Only warm services are brought without an action (residency.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from scheduler.gpu.ageing import LOOK_S, OVERDUE_S, Overdue
from scheduler.gpu.backlog import Able, OnHand
from scheduler.gpu.cells import CellGroup, Instance
from scheduler.gpu.demand import Demands
from scheduler.gpu.eviction import Victims
from scheduler.gpu.lines import Line, Place, Room
from scheduler.gpu.on_demand import Cells
from scheduler.gpu.ranking import Need, impatient
from scheduler.gpu.residents import Residents
from scheduler.gpu.sizing import best_size
from scheduler.gpu.starvation import keep_idle, owed
from scheduler.holds import Holds
from scheduler.lanes.cores import could_run
from scheduler.model import ServiceSpec, Waiting
from scheduler.state import Node, State, own_memory

AHEAD: Final = 1.25
"""Durations of an action on its least cells within which what comes counts as if it were there already."""


class Services(Cells):
    """Starts actions on instances, and decides which instances there are."""

    def __init__(self, state: State, holds: Holds) -> None:
        super().__init__(state, holds)
        self._demands = Demands()
        self._residents = Residents()
        self._victims = Victims(state, self._demands, self._residents)
        self._need = Need(state, self._residents)
        self._overdue = Overdue(state, holds, self._residents, self._victims)
        self._on_hand: OnHand | None = None
        self._kept = False
        self._withheld = False
        self._lines: dict[tuple[object, ...], Line] = {}
        self._most: dict[tuple[object, ...], float] = {}
        self._wake: float | None = None

    def came(self, waiting: Waiting, now: float) -> None:
        """Count an action for the rate of its service."""
        if not waiting.attempt:
            self._demands.come(waiting, now)

    def next_look(self) -> float | None:
        """Return when time alone may change something: an action grows impatient or overdue, or a turn ends."""
        return self._wake

    def woken(self) -> None:
        """Ask for no look until the next one says when."""
        self._wake = None

    def look(self, group: CellGroup, node: Node, now: float) -> None:
        """Start what can start on all nodes whose cells have changed: where an action can go at once decides what is brought elsewhere."""
        nodes = [node, *self._others_changed()]
        if len(self._state.floating_cells):
            lines = self._served(nodes, now, self._most)
            self._residents.look_at(each.cells for each in self._state.nodes.values())
            self._on_hand = None
            if self._overdue.open_again(nodes, lines, now):
                lines = self._served(nodes, now, self._most)
            self._swap(lines, now)
            most = {alike: line.most for alike, line in self._lines.items()}
            if self._kept or self._withheld:  # what has not made way is of use all the same
                self._served(nodes, now, {})
            self._most = {alike: most[alike] for alike, line in self._lines.items() if line.waiting}
        else:
            self._most = {}
            self._overdue.open_again(nodes, [], now)
        self._wake = self._next_wake(now)

    def _served(self, nodes: list[Node], now: float, most: Mapping[tuple[object, ...], float]) -> list[Line]:
        """Start what has a place on a resident instance; return the lines of the others.

        `most` is `Line.most` of those that waited when the last look ended.
        """
        places: dict[str, list[Place]] = {}
        for node in nodes:
            for instance in node.cells.instances:
                if instance.takes:
                    places.setdefault(instance.service, []).append((instance, node))
        lines = self._lines = {}
        kept = self._kept = self._withheld = False
        # Thousands may wait, and most of them only fall into line: next to nothing is done for each.
        for waiting in self._state.in_order([self._state.floating_cells], now):
            line = lines.get(waiting.alike)
            if line is None:
                action = waiting.action
                waiting.alike = waiting.alike or (action.service, waiting.units, action.requires, own_memory(action))
                line = lines.get(waiting.alike)
                if line is None:
                    line = lines[waiting.alike] = self._line(waiting, nodes, places)
                    if impatient(line.spec, waiting.received_at, now):
                        line.most = most.get(waiting.alike, math.inf)
            if line.places and not kept and self._state.shares.contended and self._state.comes_last(waiting, now):
                kept = True
                self._kept = owed(lines.values(), self._state.nodes.values(), now)
                keep_idle(places.values() if self._kept else ())
            if line.places and not line.stuck and self._start_resident(waiting, line, now):
                continue
            line.waiting.append(waiting)
            if waiting.received_at < line.since:
                line.since = waiting.received_at
        self._take_out()
        return [line for line in lines.values() if line.nodes and line.waiting]

    def _line(self, waiting: Waiting, nodes: list[Node], places: dict[str, list[Place]]) -> Line:
        service = waiting.action.service or ""
        spec = self._state.services.get(service, ServiceSpec(name=service))
        able = self._able(waiting)
        return Line(service, waiting.units, spec, [node for node in nodes if able(node)], places=places.get(service, []))

    def _start_resident(self, waiting: Waiting, line: Line, now: float) -> bool:
        """Start an action on the best of the places of its service, which is taken out of them once it is full."""
        own = own_memory(waiting.action)
        fitting = [
            (instance, node)
            for instance, node in line.places
            if instance.size in line.units and node in line.nodes and node.memory_free >= own and not node.cells.blocked(instance)
        ]
        allowed = [at for at in fitting if at[0].active or at[0].size <= line.most]
        self._withheld = self._withheld or len(allowed) < len(fitting)
        if not allowed:
            line.stuck = True
            return False
        best = max(allowed, key=lambda at: (at[0].size, bool(at[0].active), at[0].last_used))
        instance, node = best
        if self._holds.held(waiting, node.cells, now):
            return False
        self._start_on_cells(waiting, node.cells, node, instance, now)
        if len(instance.active) >= instance.places:
            line.places.remove(best)
        return True

    def _able(self, waiting: Waiting) -> Able:
        return lambda node: could_run(waiting, node, "gpu", node.cells) and self._fits_service(waiting, node.cells)

    def _count_on_hand(self, lines: list[Line], now: float) -> OnHand:
        """Count the actions for the cells: those that wait, those that run, and those that come within `AHEAD` of their durations."""
        on_hand = OnHand(self._state.nodes.values())
        for line in lines:
            if line.waiting:
                on_hand.add(len(line.waiting), self._able(line.waiting[0]))
        for service, load in self._demands.loads(now).items():
            on_hand.add(AHEAD * load, partial(_serves, service))
        return on_hand

    def _swap(self, lines: list[Line], now: float) -> None:
        """Bring instances for the lines that deserve one: the overdue first, each of which has a node to itself until it has one."""
        overdue = self._overdue.of(lines, now)
        claimed: dict[str, str] = {}
        for line in [*overdue, *self._need.in_order([line for line in lines if line not in overdue], now)]:
            line.nodes = [node for node in line.nodes if claimed.get(node.spec.name, line.service) == line.service]
            self._bring_what_it_deserves(line, lines, now)
            node = self._overdue.claim(line, now) if line in overdue else None
            if node is not None:
                claimed[node.spec.name] = line.service
        self._take_out()

    def _bring_what_it_deserves(self, line: Line, lines: list[Line], now: float) -> None:
        deserves = self._need.deserves(line, now)
        if deserves:
            if self._on_hand is None:
                self._on_hand = self._count_on_hand(lines, now)
            self._size(line, self._on_hand, now)
        while deserves:
            room = self._room(line, now)
            if room is None or not self._bring_for(line, room, now):
                break
            deserves = bool(line.waiting) and self._need.deserves(line, now)

    def _size(self, line: Line, on_hand: OnHand, now: float) -> None:
        """Say on how many cells a line is best served, and have its larger instances make way once it is impatient."""
        first, spec = line.waiting[0], line.spec
        line.best = best_size(line.units, first.durations_s, spec.restore_s, on_hand.per_cell(self._able(first)) / spec.max_concurrency)
        line.most = line.best if impatient(line.spec, line.since, now) else math.inf

    def _room(self, line: Line, now: float) -> Room | None:
        """Return where the largest instance up to the best size can go now, with the fewest evictions."""
        own, best = own_memory(line.waiting[0].action), None
        for node in line.nodes:
            if node.memory_free < own or node.cells.full_of(line.spec):
                continue
            room = self._room_on(node, line)
            patient = not impatient(line.spec, line.since, now)
            if room is not None and patient and self._victims.better_later(line, room, now):
                continue
            if room is not None and (best is None or room.worth > best.worth):
                best = room
        return best

    def _room_on(self, node: Node, line: Line) -> Room | None:
        group = node.cells
        idle = group.idle
        if idle < line.units[0]:
            return None
        candidates = self._victims.candidates(node, line)
        idling = [one.size for one in group.replaceable(line.spec)[:1] if not one.busy and not group.blocked(one)]
        for size in [size for size in reversed(line.units) if size <= line.best]:
            if size > idle or size in idling:  # what is to make way, or is kept idle, is not brought back elsewhere
                continue
            cleared = group.clearing(line.spec).clear(size, candidates, _idle)
            if cleared is not None:
                return Room(node, cleared)
        return None

    def _bring_for(self, line: Line, room: Room, now: float) -> bool:
        """Bring an instance, and start on it as many of the line as it has places; False where a quota keeps the first back."""
        node, spec = room.node, line.spec
        if self._holds.held(line.waiting[0], node.cells, now):
            return False
        self._overdue.bring(line, now)
        instance, eviction = node.cells.bring_onto(spec, room.cleared)
        instance.since = now
        first = line.waiting.pop(0)
        self._start_on_cells(first, node.cells, node, instance, now, evict=eviction.evicted, restore_s=spec.restore_s)
        own = own_memory(first.action)
        while line.waiting and len(instance.active) < instance.places and node.memory_free >= own:
            if self._holds.held(line.waiting[0], node.cells, now):
                break
            self._start_on_cells(line.waiting.pop(0), node.cells, node, instance, now)
        self._residents.note()
        return True

    def _next_wake(self, now: float) -> float | None:
        """Return when to look again: while somebody may still grow impatient or overdue, or waits for the end of a turn."""
        turn_ends = self._overdue.next_turn_end()
        growing = any(now - waiting.received_at < OVERDUE_S + LOOK_S for waiting in self._state.floating_cells)
        wake = min(turn_ends, now + LOOK_S if growing else math.inf)
        return None if wake == math.inf else wake


def _serves(service: str, node: Node) -> bool:
    return node.heard and node.serves(service)


def _idle(victim: Instance, going: Sequence[Instance]) -> bool:
    return not victim.busy and not victim.pinned
