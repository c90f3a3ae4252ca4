"""GPU cells under `elastic`: the instances follow a plan, and the waiting actions of a service share a swap.

Restoring a model costs about as much as an action, and blocks cells that serve nobody meanwhile. So an action is not brought an
instance because it is the next, but because its service deserves one:

1. *Resident first.* Waiting actions start in the order of the queue (`State.in_order`: priorities, shares) wherever an
   instance of their service has a place for them: on the largest one, of these on a busy one, else on the one used last.
2. *Lines.* What is left stands in lines of actions that are alike: same service, amounts, labels and memory.
3. *Plan.* At most once in `PLAN_S`, each service is given a target by placement.py: from its rate, as seen lately
   (resources/demand.py), plus its line, taken to come within `BACKLOG` durations; from what its actions are expected to take on
   each size, and from its restore time.
4. *Swap.* The first of a line has an instance brought where no node has one that it could use, or where its service holds fewer
   cells than its target and more wait than places are expected to fall free within `SOON` restores. As many of
   the line start on it as it has places. Lines take their turn in the order of their first actions.
5. *Victims.* An instance goes on unused cells, then on those of idle instances that the plan can do without (`Residents.excess`),
   least asked for first, then least recently used. So the instances of a service that is asked for grow over cells that others
   do not need, and shrink again when others do.
6. *Patience.* An action that has waited for `PATIENCE_RESTORES` restores of its service, at most `PATIENCE_S`, may have any idle
   instance evicted, whatever the plan says: no such action waits beside idle cells that would do for it, but for rule 7.
7. *Overdue.* An action that has waited for `OVERDUE_S`, and could use no instance on any node, goes before all others: nothing else is
   brought onto the node that it waits for, and instances there that have had their turn (`TURN_S`) are closed until there
   is room: they are `leaving`, take no more actions, and are evicted when idle.

The bound that follows (`bound_s`): an action waits for a service that is nowhere, because others are preferred, at most
`OVERDUE_S`, and one turn and the longest time that an action holds cells for itself and for each line that is overdue before
it; overdue lines have their turn one after the other. Where its service is resident it waits as in any queue. Kept back by a
quota, by memory, or by `instances_per_node`, it waits longer.

What this does not do: restore a service before an action of it waits. A swap is part of a grant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from scheduler.holds import Holds
from scheduler.lanes.cells import Cells
from scheduler.lanes.cores import could_run
from scheduler.model import ServiceSpec, Waiting
from scheduler.placement import Target, Want, plan
from scheduler.resources.demand import Demands
from scheduler.resources.gpu import CellGroup, Instance
from scheduler.resources.residents import Residents
from scheduler.state import Node, State, own_memory

LEAST_S: Final = 0.5
"""Seconds that an action is taken to last at least where durations are counted in: shorter ones come in bursts."""

PLAN_S: Final = 1.0
"""Seconds between two plans, and between two looks at cells that are idle while somebody waits."""

BACKLOG: Final = 2.0
"""Durations of one action within which a plan would have those served that wait."""

SOON: Final = 2.0
"""Restores of a service that its actions rather wait for a place than have another instance brought."""

PATIENCE_RESTORES: Final = 4.0
PATIENCE_S: Final = 10.0
"""Restores of its service, and seconds at most, that an action waits beside idle cells which the plan would keep as they are."""

OVERDUE_S: Final = 15.0
"""Seconds after which an action whose service is nowhere goes before all others."""

TURN_S: Final = 5.0
"""Seconds that an instance stays at least before it is closed for an overdue action."""


def bound_s(place: int, longest_s: float) -> float:
    """Return how long the `place`-th overdue line waits at most, from 1, where no action holds cells for longer than `longest_s`."""
    return OVERDUE_S + PLAN_S + place * (TURN_S + longest_s)


@dataclass(slots=True, eq=False)
class Line:
    """Waiting actions that are alike, in their order, and the nodes that are looked at and could run them.

    `since` is when the first of them came in.
    """

    service: str
    units: tuple[int, ...]
    spec: ServiceSpec
    nodes: list[Node]
    waiting: list[Waiting] = field(default_factory=list)
    since: float = math.inf


@dataclass(frozen=True, slots=True)
class Room:
    """Where an instance could go: how large it can be there, and who is evicted for it, in order."""

    node: Node
    size: int
    victims: list[Instance]


Place = tuple[Instance, Node]


class Services(Cells):
    """Starts actions on instances, and decides which instances there are, by a plan."""

    def __init__(self, state: State, holds: Holds) -> None:
        super().__init__(state, holds)
        self._demands = Demands()
        self._targets: dict[str, Target] = {}
        self._residents = Residents((), self._targets)
        self._planned_at = -math.inf
        self._wake: float | None = None
        self._turn_end = math.inf
        self._brought: dict[tuple[str, tuple[int, ...]], float] = {}

    def came(self, waiting: Waiting, now: float) -> None:
        """Count an action for the rate of its service."""
        if not waiting.attempt:
            self._demands.come(waiting, now)

    def next_look(self) -> float | None:
        """Return when time alone may let an action start: it grows impatient, or a plan changes."""
        return self._wake

    def look(self, group: CellGroup, node: Node, now: float) -> None:
        """Start what can start on all nodes whose cells have changed: where an action can go at once decides what is brought elsewhere."""
        nodes = [node, *self._others_changed()]
        if len(self._state.floating_cells):
            lines = self._served(nodes, now)
            if now - self._planned_at >= PLAN_S or any(line.service not in self._targets for line in lines):
                self._plan(lines, now)
            self._residents = Residents((each.cells for each in self._state.nodes.values()), self._targets)
            if self._open_again(nodes, lines, now):
                lines = self._served(nodes, now)
            self._swap(lines, now)
        elif any(instance.leaving is not None for each in nodes for instance in each.cells.instances):
            self._open_again(nodes, [], now)
        self._wake = self._next_wake(now)

    def _others_changed(self) -> list[Node]:
        """Return the other nodes whose cells are still to be looked at, and have them looked at no more."""
        changed = [group for group in self._state.dirty if isinstance(group, CellGroup)]
        for group in changed:
            del self._state.dirty[group]
        return [self._state.nodes[group.node] for group in changed if group.node in self._state.nodes]

    def _served(self, nodes: list[Node], now: float) -> list[Line]:
        """Start what has a place on a resident instance; return the lines of the others."""
        places: dict[str, list[Place]] = {}
        for node in nodes:
            for instance in node.cells.instances:
                if instance.leaving is None and len(instance.active) < instance.places:
                    places.setdefault(instance.service, []).append((instance, node))
        lines: dict[tuple[object, ...], Line] = {}
        for waiting in self._state.in_order([self._state.floating_cells], now):
            action = waiting.action
            key = (action.service, waiting.units, action.requires, own_memory(action))
            line = lines.get(key)
            if line is None:
                line = lines[key] = self._line(waiting, nodes)
            free = places.get(line.service)
            if not (free and self._start_resident(waiting, line, free, now)):
                line.waiting.append(waiting)
                line.since = min(line.since, waiting.received_at)
        self._take_out()
        return [line for line in lines.values() if line.nodes and line.waiting]

    def _line(self, waiting: Waiting, nodes: list[Node]) -> Line:
        service = waiting.action.service or ""
        spec = self._state.services.get(service, ServiceSpec(name=service))
        able = [node for node in nodes if could_run(waiting, node, "gpu", node.cells) and self._fits_service(waiting, node.cells)]
        return Line(service, waiting.units, spec, able)

    def _start_resident(self, waiting: Waiting, line: Line, places: list[Place], now: float) -> bool:
        """Start an action on the best of the places of its service, which is taken out of them once it is full."""
        own = own_memory(waiting.action)
        fitting = [at for at in places if at[0].size in line.units and at[1] in line.nodes and at[1].memory_free >= own]
        if not fitting:
            return False
        best = max(fitting, key=lambda at: (at[0].size, bool(at[0].active), at[0].last_used))
        instance, node = best
        if self._holds.held(waiting, node.cells, now):
            return False
        self._start_on_cells(waiting, node.cells, node, instance, now)
        if len(instance.active) >= instance.places:
            places.remove(best)
        return True

    def _take_out(self) -> None:
        """Take those that were started out of the queue: not before, for no walk over it may see it change."""
        for waiting in self._started:
            self._state.floating_cells.remove(waiting)
        self._started.clear()

    def _plan(self, lines: list[Line], now: float) -> None:
        """Give each service its target."""
        self._planned_at = now
        groups = [node.cells for node in self._state.nodes.values() if node.cells.capacity]
        waiting: dict[str, int] = {}
        for line in lines:
            waiting[line.service] = waiting.get(line.service, 0) + len(line.waiting)
        wants: dict[str, Want] = {}
        for name, demand in self._demands.by_service.items():
            spec = self._state.services.get(name)
            if spec is None:
                continue
            demand.forget(now)
            able = [group.capacity for group in groups if spec.memory_mb <= group.cell_memory_mb]
            wants[name] = Want(
                rate=demand.rate + waiting.get(name, 0) / (BACKLOG * max(demand.durations_s[0], LEAST_S)),
                units=demand.units,
                durations_s=demand.durations_s,
                places=spec.max_concurrency,
                restore_s=spec.restore_s,
                most=sum(able) if spec.instances_per_node is None else spec.instances_per_node * len(able),
            )
        self._targets = dict(zip(wants, plan(list(wants.values()), sum(group.capacity for group in groups)), strict=True))

    def _absent(self, line: Line) -> bool:
        return not self._residents.usable(line.service, line.units)

    def _overdue(self, line: Line, now: float) -> bool:
        return now - line.since >= OVERDUE_S and self._absent(line)

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
                if not any(self._overdue(line, now) for line in waited_for):
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
        for line in [*overdue, *(line for line in lines if line not in overdue)]:
            line.nodes = [node for node in line.nodes if claimed.get(node.spec.name, line.service) == line.service]
            while line.waiting and self._deserves(line, now):
                room = self._room(line, now)
                if room is None or not self._bring_for(line, room, now):
                    break
            if line.waiting and line in overdue and self._absent(line):
                node = self._close_instances(line, now)
                if node is not None:
                    claimed[node.spec.name] = line.service
        self._take_out()

    def _deserves(self, line: Line, now: float) -> bool:
        if self._absent(line) or now - line.since >= _patience_s(line.spec):
            return True
        return self._residents.below(line.service) and len(line.waiting) > self._places_soon(line, now)

    def _places_soon(self, line: Line, now: float) -> int:
        """Count the places that the line's service is expected to have free within `SOON` restores."""
        soon = now + SOON * line.spec.restore_s
        running = self._state.running
        usable = self._residents.usable(line.service, line.units)
        return sum(running[action_id].expected_end <= soon for instance in usable for action_id in instance.active)

    def _room(self, line: Line, now: float) -> Room | None:
        """Return where the largest instance up to the planned size can go now, with the fewest evictions."""
        own, best = own_memory(line.waiting[0].action), None
        for node in line.nodes:
            if node.memory_free < own or node.cells.full_of(line.spec):
                continue
            room = self._room_on(node, line, now)
            if room is not None and (best is None or (room.size, -len(room.victims)) > (best.size, -len(best.victims))):
                best = room
        return best

    def _room_on(self, node: Node, line: Line, now: float) -> Room | None:
        sizes = [size for size in reversed(line.units) if size <= self._residents.target(line.service).size] or [line.units[0]]
        late = now - line.since >= _patience_s(line.spec)
        free, victims = node.cells.unused, list[Instance]()
        for victim in self._candidates(node, line):
            if free >= sizes[0]:
                break
            spare = late or victim.leaving is not None or _replaced(victim, node, line) or self._residents.excess(victim, victims)
            if spare and not victim.active:
                victims.append(victim)
                free += victim.size
        size = next((size for size in sizes if size <= free), None)
        return None if size is None else Room(node, size, victims)

    def _candidates(self, node: Node, line: Line) -> list[Instance]:
        """Return the instances that could go for a line, busy or not, in the order in which they would."""

        def order(instance: Instance) -> tuple[object, ...]:
            asked = self._demands.rate(instance.service) / max(1, self._residents.count(instance.service))
            leaving = instance.leaving is not None
            return (not _replaced(instance, node, line), not leaving, bool(instance.active), asked, instance.last_used, instance.cell_ids)

        ours = (None, line.service)
        others = (i for i in node.cells.instances if i.service != line.service or i.size not in line.units)
        return sorted((i for i in others if not i.pinned and i.leaving in ours), key=order)

    def _bring_for(self, line: Line, room: Room, now: float) -> bool:
        """Bring an instance, and start on it as many of the line as it has places; False where a quota keeps the first back."""
        node, spec = room.node, line.spec
        if self._holds.held(line.waiting[0], node.cells, now):
            return False
        if self._overdue(line, now):  # what it kept others off may be elsewhere
            for other in self._state.nodes.values():
                self._state.touch(other.cells)
        instance, eviction = node.cells.bring(spec, room.size, room.victims)
        instance.since = self._brought[line.service, line.units] = now
        first = line.waiting.pop(0)
        self._start_on_cells(first, node.cells, node, instance, now, evict=eviction.services, restore_s=spec.restore_s)
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
        for node in able:
            if any(instance.leaving == line.service for instance in node.cells.instances):
                return node
        if not able or self._holds.held(first, able[0].cells, now):
            return None
        best, most = able[0], -1
        for node in able:
            closed, free = list[Instance](), node.cells.unused
            for instance in self._candidates(node, line):
                if free >= line.units[0]:
                    break
                turn_end = instance.since + TURN_S
                if instance.active and now < turn_end:
                    self._turn_end = min(self._turn_end, turn_end)
                    continue
                closed.append(instance)
                free += instance.size
            if free >= line.units[0]:
                for instance in closed:
                    instance.leaving = line.service
                self._residents.note()
                return node
            if free > most:
                best, most = node, free
        return best

    def _next_wake(self, now: float) -> float | None:
        """Return when to look again: while somebody may still grow impatient or overdue, or waits for the end of a turn."""
        turn_end, self._turn_end = self._turn_end, math.inf
        growing = any(now - waiting.received_at < OVERDUE_S + PLAN_S for waiting in self._state.floating_cells)
        wake = min(turn_end, now + PLAN_S if growing else math.inf)
        return None if wake == math.inf else wake


def _patience_s(spec: ServiceSpec) -> float:
    return min(PATIENCE_S, PATIENCE_RESTORES * spec.restore_s)


def _replaced(instance: Instance, node: Node, line: Line) -> bool:
    """Say whether an instance must go for a line because the node can hold no more of the service than it does."""
    most = line.spec.instances_per_node
    if most is None or instance.service != line.service:
        return False
    return sum(other.service == line.service for other in node.cells.instances) >= most
