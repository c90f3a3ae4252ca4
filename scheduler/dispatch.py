"""Who starts now: looks at every group that changed, asks the policy, hands out units.

A group is looked at only when something in it changed: an action came, units came back, a rate opened. What it
costs therefore does not grow with the rest of the system.

Lanes, by what an action needs:

| lane | waits in | units |
|---|---|---|
| cores, in an environment | its node's or its pod's queue | cores of that node or pod |
| cores, anywhere | `floating_cores` | cores of any node of the pool `cpu` |
| cells | `floating_cells` | cells of any node of the pool `gpu` |
| quota only | the quota's queue | a request; runs on a node of the pool `api` |
| nothing | `unplaced`, while there is no node | none |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice

from scheduler.commands import Resize
from scheduler.model import Grant, Waiting
from scheduler.policies.abstract import Change, Choice
from scheduler.resources.cpu import CoreGroup
from scheduler.resources.gpu import CellGroup, Instance
from scheduler.resources.queue import merged
from scheduler.resources.quota import QuotaState
from scheduler.state import Node, State, memory_of


class Dispatcher:
    """Starts what can start, one changed group after another."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._static_cells: dict[str, int] = {}
        self._held_by_quota: dict[str, dict[CoreGroup | CellGroup, None]] = {}

    def run(self, now: float) -> bool:
        """Look at the changed groups; return whether there were any."""
        dirty = self._state.dirty
        looked = bool(dirty)
        while dirty:
            group = next(iter(dirty))
            del dirty[group]
            if isinstance(group, CoreGroup):
                self._cores(group, now)
            elif isinstance(group, CellGroup):
                self._cells(group, now)
            else:
                self._quota(group, now)
        return looked

    def next_opening(self, now: float) -> float | None:
        """Return when the next quota with waiting actions opens; None where none does by itself."""
        times = [
            at
            for name, quota in self._state.quotas.items()
            if len(quota.queue) or name in self._held_by_quota
            if (at := quota.opens_at(now)) is not None and at > now
        ]
        return min(times, default=None)

    def open_quotas(self, now: float) -> None:
        """Mark what may go on because a rate has opened."""
        for name, quota in self._state.quotas.items():
            if quota.opens_at(now) == now:
                if len(quota.queue):
                    self._state.touch(quota)
                for group in self._held_by_quota.pop(name, {}):
                    self._state.touch(group)

    def _cores(self, group: CoreGroup, now: float) -> None:
        state = self._state
        node = state.nodes.get(group.node)
        free = group.free
        reclaimable = group.reclaimable() if state.policy.resizes else 0
        if node is None or not free + reclaimable:
            return
        floating = state.floating_cores if group is node.cores else None
        queue = merged(group.queue, floating) if floating is not None else iter(group.queue)
        walk = self._eligible(queue, node, "cpu")
        candidates: list[Waiting] = []
        behind: list[Waiting] = []
        room, memory = free + reclaimable, node.memory_free
        for waiting in walk:
            wanted = state.policy.wanted(waiting, group.capacity)
            if wanted > room or memory_of(waiting.action) > memory or self._held(waiting, group, now):
                behind = [waiting, *islice(walk, max(0, state.policy.lookahead - 1))] if state.policy.lookahead else []
                break
            candidates.append(waiting)
            room -= wanted
            memory -= memory_of(waiting.action)
        elastic = list(group.elastic.values()) if state.policy.resizes else []
        if not candidates and not (elastic and free):
            return
        plan = state.policy.plan(candidates, behind, elastic, free, group, now)
        for change in sorted(plan.changes, key=lambda change: change.units > change.running.units):
            self._resize(change, group, now)
        for choice in plan.choices:
            self._start_on_cores(choice, group, node, now)

    def _resize(self, change: Change, group: CoreGroup, now: float) -> None:
        running, grant = change.running, change.running.grant
        more = change.units - grant.units
        if more > 0:
            core_ids = grant.core_ids + group.take(more)
        else:
            core_ids = grant.core_ids[: change.units]
            group.give_back(grant.core_ids[change.units :])
        running.regrant(replace(grant, units=change.units, core_ids=core_ids), now)
        self._state.out.append(Resize(id=running.waiting.id, node=grant.node, attempt=grant.attempt, core_ids=core_ids))

    def _eligible(self, queue: Iterable[Waiting], node: Node, pool: str) -> Iterator[Waiting]:
        for waiting in queue:
            if waiting.action.environment is not None or node.offers(pool, waiting.action.requires):
                yield waiting

    def _held(self, waiting: Waiting, group: CoreGroup | CellGroup, now: float) -> bool:
        """Say whether a quota keeps the action back; if so, the group is looked at again when it opens."""
        for name in waiting.action.cost.quotas:
            if self._state.quotas[name].opens_at(now) != now:
                self._held_by_quota.setdefault(name, {})[group] = None
                return True
        return False

    def _start_on_cores(self, choice: Choice, group: CoreGroup, node: Node, now: float) -> None:
        waiting = choice.waiting
        if self._held(waiting, group, now):
            return
        if not group.queue.remove(waiting):
            self._state.floating_cores.remove(waiting)
        core_ids = group.take(choice.units)
        node.memory_free -= memory_of(waiting.action)
        self._take_quotas(waiting, now)
        grant = Grant(node=node.spec.name, attempt=waiting.attempt + 1, units=choice.units, core_ids=core_ids)
        group.enter(self._state.start(waiting, grant, now, waiting.duration_s(choice.units)))

    def _take_quotas(self, waiting: Waiting, now: float) -> None:
        for name in waiting.action.cost.quotas:
            self._state.quotas[name].take(now)

    def _cells(self, group: CellGroup, now: float) -> None:
        node = self._state.nodes.get(group.node)
        if node is None:
            return
        if self._state.policy.pod_cores():
            self._static_shares(group, node, now)
            return
        needing: list[Waiting] = []
        reserved = 0
        for waiting in list(self._eligible(self._state.floating_cells, node, "gpu")):
            if self._held(waiting, group, now):
                break
            instance = group.place_on(waiting.action.service or "", waiting.units)
            if instance is not None and (instance.active or group.free - len(instance.cell_ids) >= reserved):
                self._start_on_cells(waiting, group, node, instance, now)
                continue
            spec = self._state.services[waiting.action.service or ""]
            if group.full_of(spec) or any(other.action.service == spec.name for other in needing if spec.instances_per_node):
                continue
            wanted = self._state.policy.wanted(waiting, group.capacity)
            if reserved + wanted > group.free:
                break
            needing.append(waiting)
            reserved += wanted
        if needing:
            for choice in self._state.policy.choose(needing, [], group.free, group, now):
                self._bring_and_start(choice, group, node, now)

    def _bring_and_start(self, choice: Choice, group: CellGroup, node: Node, now: float) -> None:
        waiting = choice.waiting
        instance = group.place_on(waiting.action.service or "", waiting.units)
        if instance is not None:
            self._start_on_cells(waiting, group, node, instance, now)
            return
        if self._held(waiting, group, now):
            return
        spec = self._state.services[waiting.action.service or ""]
        instance, eviction = group.bring(spec, choice.units)
        self._start_on_cells(waiting, group, node, instance, now, evict=eviction.services, restore_s=spec.restore_s)

    def _start_on_cells(
        self,
        waiting: Waiting,
        group: CellGroup,
        node: Node,
        instance: Instance,
        now: float,
        *,
        evict: tuple[str, ...] = (),
        restore_s: float | None = None,
    ) -> None:
        self._state.floating_cells.remove(waiting)
        instance.active[waiting.id] = None
        instance.last_used = now
        self._take_quotas(waiting, now)
        grant = Grant(
            node=node.spec.name,
            attempt=waiting.attempt + 1,
            units=len(instance.cell_ids),
            cell_ids=instance.cell_ids,
            evict=evict,
            restore=restore_s is not None,
        )
        expected_s = (restore_s or 0.0) + waiting.duration_s(grant.units)
        group.running[waiting.id] = self._state.start(waiting, grant, now, expected_s)

    def _static_shares(self, group: CellGroup, node: Node, now: float) -> None:
        """Serve each service from its own share of the cells, which it keeps for good and never restores."""
        state = self._state
        share = sum(n.cells.capacity for n in state.nodes.values()) // max(1, len(state.services))
        for waiting in list(self._eligible(state.floating_cells, node, "gpu")):
            service = waiting.action.service or ""
            instance = group.place_on(service, waiting.units)
            if instance is None:
                room = min(share - self._static_cells.get(service, 0), group.free)
                sizes = [amount for amount in waiting.units if amount <= room]
                if not sizes:
                    continue
                size = min(sizes, key=lambda amount: (waiting.duration_s(amount), amount))
                instance, _ = group.bring(state.services[service], size)
                instance.pinned = True
                self._static_cells[service] = self._static_cells.get(service, 0) + size
            self._start_on_cells(waiting, group, node, instance, now)

    def _quota(self, quota: QuotaState, now: float) -> None:
        for waiting in list(quota.queue):
            if quota.opens_at(now) != now:
                return
            node = self.least_busy("api", waiting.action.requires)
            if node is None:
                continue
            quota.queue.remove(waiting)
            self._take_quotas(waiting, now)
            self.start_without_units(waiting, node, now)

    def forget_node(self) -> None:
        """Count the static shares anew after a node has gone."""
        self._static_cells.clear()
        for node in self._state.nodes.values():
            for instance in node.cells.instances:
                if instance.pinned:
                    held = self._static_cells.get(instance.service, 0)
                    self._static_cells[instance.service] = held + len(instance.cell_ids)

    def least_busy(self, pool: str, requires: tuple[str, ...]) -> Node | None:
        """Return the node of `pool` that runs the fewest actions."""
        nodes = [node for node in self._state.nodes.values() if node.offers(pool, requires)]
        return min(nodes, key=lambda node: len(node.running), default=None)

    def start_unplaced(self, now: float) -> None:
        """Start the actions that need nothing, wherever a node is up."""
        for waiting in list(self._state.unplaced):
            node = self.least_busy("cpu", waiting.action.requires)
            if node is not None:
                self._state.unplaced.remove(waiting)
                self.start_without_units(waiting, node, now)

    def start_without_units(self, waiting: Waiting, node: Node, now: float) -> None:
        """Start an action that holds no cores or cells."""
        grant = Grant(node=node.spec.name, attempt=waiting.attempt + 1)
        self._state.start(waiting, grant, now, waiting.durations_s[0])
