"""GPU cells under `elastic`: what waits for a service shares a swap, and cells are as many or as few to an instance as the load allows.

Restoring a model costs about as much as an action, and blocks cells that serve nobody meanwhile. So an action is not brought an
instance because it is the next, but because its service deserves one:

1. *Resident first.* Waiting actions start in the order of the queue (`State.in_order`: priorities, shares) wherever an
   instance of their service has a place for them: on the largest one, of these on a busy one, else on the one used last. Those
   of jobs beyond their share do not while others are owed cells (owed.py).
2. *Lines.* What is left stands in lines of actions that are alike: same service, amounts, labels and memory.
3. *Swap.* A line has an instance brought where no node has one that it could use, or where more wait than should find a place within
   `SOON` restores: on each place one after the other, where they are short. As many of the line start on it as it has places.
4. *Order.* Jobs within their share come first, then priorities, then the lines with most waiting for each place that they have:
   there a restore serves most.
5. *Size.* What is brought is as large as sizing.py says, by all that is on hand for the cells that the line could use: with few
   actions about, idle cells are best used by one that is there. It is smaller where fewer cells are idle: what waits for larger ones
   wastes those that it has.
6. *Victims.* An instance goes on unused cells, then on those of idle instances, least asked for first, then least recently used. Where
   actions that should come for these would wait for long, and a busy one that is hardly asked for is done soon, it waits for that.
7. *Patience.* An action that has waited for `PATIENCE_RESTORES` restores of its service, at most `PATIENCE_S`, is brought an instance,
   however soon a place should fall free: no such action waits beside idle cells that would do for it, but for rule 8. Then idle
   instances of its own that are too large for the load (rule 5) are victims too, and it starts on them only if they cannot go.
8. *Overdue.* An action that has waited for `OVERDUE_S`, and could use no instance on any node, goes before all others: nothing else is
   brought onto the node that it waits for, and instances there that have had their turn (`TURN_S`) are closed until there
   is room: they are `leaving`, take no more actions, and are evicted when idle.

The bound that follows (`bound_s`): an action waits for a service that is nowhere, because others are preferred, at most
`OVERDUE_S`, and one turn and the longest time that an action holds cells for itself and for each line that is overdue before
it; overdue lines have their turn one after the other. Where its service is resident it waits as in any queue. Kept back by a
quota, by memory, or by `instances_per_node`, it waits longer.

What this does not do: plan which service should hold how many cells, or restore one on a guess that it will be asked for;
docs/scheduling.md says what that earned. A swap is part of a grant. Only warm services are brought without an action (residency.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from scheduler.holds import Holds
from scheduler.lanes.cells import Cells
from scheduler.lanes.cores import could_run
from scheduler.lanes.lines import Line, Place, Room
from scheduler.lanes.on_hand import Able, OnHand
from scheduler.lanes.owed import keep_idle, owed
from scheduler.lanes.victims import Victims
from scheduler.model import ServiceSpec, Waiting
from scheduler.resources.clearing import Spare
from scheduler.resources.demand import Demands
from scheduler.resources.gpu import CellGroup, Instance
from scheduler.resources.residents import Residents
from scheduler.sizing import best_size
from scheduler.state import Node, State, own_memory

LOOK_S: Final = 1.0
"""Seconds between two looks at cells that are idle while somebody waits."""

SOON: Final = 2.0
"""Restores of a service that its actions rather wait for a place than have another instance brought."""

PATIENCE_RESTORES: Final = 4.0
PATIENCE_S: Final = 10.0
"""Restores of its service, and seconds at most, that an action waits beside idle cells for a place that should fall free."""

LEAST_S: Final = 0.01
"""What an action is taken to last at least, where its turns on an instance are counted."""

AHEAD: Final = 1.25
"""Durations of an action on its least cells within which what comes counts as if it were there already."""

NO_PLACE: Final = 0.5
"""What a line that has no place at all counts as having, so that many without a place come before few, and those before all others."""

OVERDUE_S: Final = 15.0
"""Seconds after which an action whose service is nowhere goes before all others."""

TURN_S: Final = 5.0
"""Seconds that an instance stays at least before it is closed for an overdue action."""


def bound_s(place: int, longest_s: float) -> float:
    """Return how long the `place`-th overdue line waits at most, from 1, where no action holds cells for longer than `longest_s`."""
    return OVERDUE_S + LOOK_S + place * (TURN_S + longest_s)


class Services(Cells):
    """Starts actions on instances, and decides which instances there are."""

    def __init__(self, state: State, holds: Holds) -> None:
        super().__init__(state, holds)
        self._demands = Demands()
        self._residents = Residents(())
        self._victims = Victims(state, self._demands)
        self._on_hand: OnHand | None = None
        self._kept = False
        self._withheld = False
        self._most: dict[tuple[str, tuple[int, ...]], int] = {}
        self._wake: float | None = None
        self._look_at = math.inf
        self._brought: dict[tuple[str, tuple[int, ...]], float] = {}

    def came(self, waiting: Waiting, now: float) -> None:
        """Count an action for the rate of its service."""
        if not waiting.attempt:
            self._demands.come(waiting, now)

    def next_look(self) -> float | None:
        """Return when time alone may let an action start: it grows impatient."""
        return self._wake

    def woken(self) -> None:
        """Ask for no look until the next one says when."""
        self._wake = None

    def look(self, group: CellGroup, node: Node, now: float) -> None:
        """Start what can start on all nodes whose cells have changed: where an action can go at once decides what is brought elsewhere."""
        nodes = [node, *self._others_changed()]
        if len(self._state.floating_cells):
            lines = self._served(nodes, now, self._most)
            self._residents = self._victims.residents = Residents(each.cells for each in self._state.nodes.values())
            self._on_hand = None
            if self._open_again(nodes, lines, now):
                lines = self._served(nodes, now, self._most)
            self._swap(lines, now)
            if self._kept or self._withheld:  # what has not made way is of use all the same
                self._served(nodes, now, {})
        elif any(instance.leaving is not None for each in nodes for instance in each.cells.instances):
            self._open_again(nodes, [], now)
        self._wake = self._next_wake(now)

    def _served(self, nodes: list[Node], now: float, most: Mapping[tuple[str, tuple[int, ...]], int]) -> list[Line]:
        """Start what has a place on a resident instance; return the lines of the others.

        `most` are the cells of the largest idle instances that actions of a service and amounts may have, where not all may.
        """
        places: dict[str, list[Place]] = {}
        for node in nodes:
            for instance in node.cells.instances:
                if instance.takes:
                    places.setdefault(instance.service, []).append((instance, node))
        lines: dict[tuple[object, ...], Line] = {}
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
                    if _late(line.spec, waiting.received_at, now):
                        line.most = most.get((line.service, line.units), math.inf)
            if line.places and not kept and self._state.shares.contended and self._state.comes_last(waiting, now):
                kept = True
                self._kept = owed(lines.values(), self._state.nodes.values(), now, OVERDUE_S)
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

    def _absent(self, line: Line) -> bool:
        return not self._residents.usable(line.service, line.units)

    def _shut_out(self, line: Line) -> bool:
        """Say whether a line's service is nowhere, or only where others compute."""
        return all(self._residents.blocked(instance) for instance in self._residents.usable(line.service, line.units))

    def _overdue(self, line: Line, now: float) -> bool:
        return now - line.since >= OVERDUE_S and self._shut_out(line)

    def _turn(self, line: Line) -> float:
        return max(line.since, self._brought.get((line.service, line.units), -math.inf))

    def _open_again(self, nodes: list[Node], lines: list[Line], now: float) -> bool:
        """Keep instances that need not leave any more; say whether there are any."""
        kept = False
        for node in nodes:
            for instance in node.cells.instances:
                if instance.leaving is None:
                    continue
                waited_for = (line for line in lines if line.service == instance.leaving and node in line.nodes)
                if not any(self._overdue(line, now) and node.cells.could_serve(line.spec, line.units) for line in waited_for):
                    instance.leaving = None
                    kept = True
        if kept:
            self._residents.note()
        return kept

    def _swap(self, lines: list[Line], now: float) -> None:
        """Bring instances for the lines that deserve one: the overdue first, each of which has a node to itself until it has one."""
        # Who was brought something goes after those that were not, though it may have waited longer: all have their turn.
        closing = {i.leaving for node in self._state.nodes.values() for i in node.cells.instances}  # only asked for membership
        late = (line for line in lines if self._overdue(line, now))
        # For whom instances leave already has the node to itself until they are gone: two that wait for each other would never end.
        overdue = sorted(late, key=lambda line: (line.service not in closing, self._turn(line)))
        claimed: dict[str, str] = {}
        for line in [*overdue, *self._by_need([line for line in lines if line not in overdue], now)]:
            line.nodes = [node for node in line.nodes if claimed.get(node.spec.name, line.service) == line.service]
            deserves = self._deserves(line, now)
            if deserves:
                if self._on_hand is None:
                    self._on_hand = self._count_on_hand(lines, now)
                self._size(line, self._on_hand, now)
            while deserves:
                room = self._room(line, now)
                if room is None or not self._bring_for(line, room, now):
                    break
                deserves = bool(line.waiting) and self._deserves(line, now)
            if line.waiting and line in overdue and self._shut_out(line):
                node = self._close_instances(line, now)
                if node is not None:
                    claimed[node.spec.name] = line.service
        self._take_out()

    def _size(self, line: Line, on_hand: OnHand, now: float) -> None:
        """Say on how many cells a line is best served, and have its larger instances make way once it has waited in vain."""
        first, spec = line.waiting[0], line.spec
        line.best = best_size(line.units, first.durations_s, spec.restore_s, on_hand.per_cell(self._able(first)) / spec.max_concurrency)
        if _late(line.spec, line.since, now) and line.best < line.units[-1]:
            self._most[line.service, line.units] = line.best
        else:
            self._most.pop((line.service, line.units), None)

    def _largest(self, line: Line) -> float:
        """Return the cells of the largest instance of its own that a line does not have make way."""
        return self._most.get((line.service, line.units), math.inf)

    def _by_need(self, lines: list[Line], now: float) -> list[Line]:
        """Return lines in the order in which they are brought instances."""

        def need(line: Line) -> tuple[bool, int, float]:
            first = line.waiting[0]
            places = sum(instance.places for instance in self._residents.usable(line.service, line.units))
            return self._state.comes_last(first, now), -first.action.priority, -len(line.waiting) / (places + NO_PLACE)

        return sorted(lines, key=need) if len(lines) > 1 else lines

    def _deserves(self, line: Line, now: float) -> bool:
        return _late(line.spec, line.since, now) or self._absent(line) or len(line.waiting) > self._places_soon(line, now)

    def _places_soon(self, line: Line, now: float) -> int:
        """Count how many of a line should find a place of its service within `SOON` restores: on each in turn, where they are short."""
        usable = self._residents.usable(line.service, line.units)
        return sum(self._turns_soon(instance, line, now) for instance in usable)

    def _turns_soon(self, instance: Instance, line: Line, now: float) -> int:
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

    def _room(self, line: Line, now: float) -> Room | None:
        """Return where the largest instance up to the best size can go now, with the fewest evictions."""
        own, best = own_memory(line.waiting[0].action), None
        for node in line.nodes:
            if node.memory_free < own or node.cells.full_of(line.spec):
                continue
            room = self._room_on(node, line)
            patient = not _late(line.spec, line.since, now)
            if room is not None and patient and self._victims.better_later(line, room, self._largest(line), now):
                continue
            if room is not None and (best is None or room.worth > best.worth):
                best = room
        return best

    def _room_on(self, node: Node, line: Line) -> Room | None:
        group = node.cells
        idle = group.idle
        if idle < line.units[0]:
            return None
        candidates = self._victims.candidates(node, line, self._largest(line))
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
        if self._overdue(line, now):  # what it kept others off may be elsewhere
            for other in self._state.nodes.values():
                self._state.touch(other.cells)
        instance, eviction = node.cells.bring_onto(spec, room.cleared)
        instance.since = self._brought[line.service, line.units] = now
        first = line.waiting.pop(0)
        self._start_on_cells(first, node.cells, node, instance, now, evict=eviction.evicted, restore_s=spec.restore_s)
        own = own_memory(first.action)
        while line.waiting and len(instance.active) < instance.places and node.memory_free >= own:
            if self._holds.held(line.waiting[0], node.cells, now):
                break
            self._start_on_cells(line.waiting.pop(0), node.cells, node, instance, now)
        self._residents.note()
        return True

    def _close_instances(self, line: Line, now: float) -> Node | None:
        """Close instances until a line has room for its least amount; return the node that it waits for, if there is any."""
        first = line.waiting[0]
        able = [node for node in line.nodes if node.memory_free >= own_memory(first.action)]
        able = [node for node in able if node.cells.could_serve(line.spec, line.units)]
        for node in able:
            if any(instance.leaving == line.service for instance in node.cells.instances):
                return node
        if not able or self._holds.held(first, able[0].cells, now):
            return None
        best, most = able[0], -1
        for node in able:
            closed, free = self._closable(node, line, now)
            if closed is not None:
                for instance in closed:
                    instance.leaving = line.service
                self._residents.note()
                return node
            if free > most:
                best, most = node, free
        return best

    def _closable(self, node: Node, line: Line, now: float) -> tuple[list[Instance] | None, int]:
        """Return who must take no more actions until a line has room on a node, and else how many cells there are for it."""
        group = node.cells
        for own in group.instances:
            others = group.others_on(own.cell_ids, line.service)
            if own.service == line.service and own.size in line.units and all([self._had_its_turn(other, now) for other in others]):
                return others, own.size
        clearing = group.clearing(line.spec)
        spare: Spare = lambda victim, going: self._had_its_turn(victim, now)  # noqa: E731
        replaced = group.replaceable(line.spec)[:1]
        if any(instance.size in line.units for instance in replaced):  # it need not go: it is waited for
            return None, replaced[0].size
        if not all([self._had_its_turn(instance, now) for instance in replaced]):
            return None, 0
        cleared = clearing.clear(line.units[0], self._victims.candidates(node, line, self._largest(line)), spare)
        if cleared is None:
            return None, len(clearing.room())
        return [*replaced, *group.others_on(cleared.cell_ids, line.service)], line.units[0]

    def _had_its_turn(self, instance: Instance, now: float) -> bool:
        turn_end = instance.since + TURN_S
        if instance.busy and now < turn_end:
            self._look_at = min(self._look_at, turn_end)
            return False
        return True

    def _next_wake(self, now: float) -> float | None:
        """Return when to look again: while somebody may still grow impatient or overdue, or waits for the end of a turn."""
        look_at, self._look_at = self._look_at, math.inf
        growing = any(now - waiting.received_at < OVERDUE_S + LOOK_S for waiting in self._state.floating_cells)
        wake = min(look_at, now + LOOK_S if growing else math.inf)
        return None if wake == math.inf else wake


def _late(spec: ServiceSpec, since: float, now: float) -> bool:
    return now - since >= min(PATIENCE_S, PATIENCE_RESTORES * spec.restore_s)


def _serves(service: str, node: Node) -> bool:
    return node.heard and node.serves(service)


def _idle(victim: Instance, going: Sequence[Instance]) -> bool:
    return not victim.busy and not victim.pinned
