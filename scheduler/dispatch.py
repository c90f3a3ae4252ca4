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

from dataclasses import replace
from itertools import islice

from scheduler.commands import Resize
from scheduler.model import Grant, Waiting
from scheduler.policies.abstract import Change, Choice
from scheduler.resources.cpu import CoreGroup
from scheduler.resources.gpu import CellGroup, Instance
from scheduler.resources.queue import merged
from scheduler.resources.quota import QuotaState
from scheduler.state import Node, State, own_memory
from tangram.action import QUOTA_PREFIX


class Dispatcher:
    """Starts what can start, one changed group after another."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._static_cells: dict[str, int] = {}
        self._held_by_quota: dict[str, dict[CoreGroup | CellGroup | QuotaState, int]] = {}

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
        times = (self._opens_at(name, now) for name in self._held_by_quota)
        return min((at for at in times if at is not None), default=None)

    def _opens_at(self, name: str, now: float) -> float | None:
        """Return when the quota has room for the least of what it keeps back."""
        return self._state.quotas[name].opens_at(now, min(self._held_by_quota[name].values()))

    def open_quotas(self, now: float) -> None:
        """Mark what may go on because a rate has opened."""
        for name in [name for name in self._held_by_quota if self._opens_at(name, now) == now]:
            for group in self._held_by_quota.pop(name):
                self._state.touch(group)

    def _cores(self, group: CoreGroup, now: float) -> None:
        state = self._state
        node = state.nodes.get(group.node)
        free = group.free
        elastic = group.resizable() if state.policy.resizes else []
        reclaimable = sum([running.units - running.waiting.least for running in elastic])
        if node is None or not free + reclaimable:
            return
        floating = state.floating_cores if group is node.cores else None
        queue = merged(group.queue, floating) if floating is not None else iter(group.queue)
        walk = (waiting for waiting in queue if waiting.action.environment is not None or self._could_run(waiting, node, "cpu", group))
        candidates: list[Waiting] = []
        behind: list[Waiting] = []
        room, memory = free + reclaimable, node.memory_free
        for waiting in walk:
            wanted = state.policy.wanted(waiting, group.capacity)
            if wanted > room:
                behind = [waiting, *islice(walk, max(0, state.policy.lookahead - 1))] if state.policy.lookahead else []
                break
            own = own_memory(waiting.action)
            if own > memory:
                memory = 0  # those behind that need none of it go on; only closing environments may ever free it
                continue
            if waiting.action.cost.quotas and self._held(waiting, group, now):
                continue
            candidates.append(waiting)
            room -= wanted
            memory -= own
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

    def _could_run(self, waiting: Waiting, node: Node, pool: str, group: CoreGroup | CellGroup) -> bool:
        """Say whether the group, were it all free, could run an action that is bound to no node."""
        action = waiting.action
        return node.offers(pool, action.requires) and waiting.least <= group.capacity and own_memory(action) <= node.spec.memory_mb

    def _fits_service(self, waiting: Waiting, group: CellGroup) -> bool:
        service = self._state.services.get(waiting.action.service or "")
        return service is not None and service.memory_mb <= group.cell_memory_mb

    def _held(self, waiting: Waiting, group: CoreGroup | CellGroup | QuotaState, now: float) -> bool:
        """Say whether a quota keeps the action back; if so, the group is looked at again when it opens."""
        for name in waiting.action.cost.quotas:
            requests = _requests(waiting, name)
            if self._state.quotas[name].opens_at(now, requests) != now:
                held = self._held_by_quota.setdefault(name, {})
                held[group] = min(requests, held.get(group, requests))
                return True
        return False

    def _start_on_cores(self, choice: Choice, group: CoreGroup, node: Node, now: float) -> None:
        waiting = choice.waiting
        if self._held(waiting, group, now):
            return
        if not group.queue.remove(waiting):
            self._state.floating_cores.remove(waiting)
        core_ids = group.take(choice.units)
        self._take_quotas(waiting, now)
        grant = Grant(node=node.spec.name, attempt=waiting.attempt + 1, units=choice.units, core_ids=core_ids)
        group.enter(self._state.start(waiting, grant, now, waiting.duration_s(choice.units)))

    def _take_quotas(self, waiting: Waiting, now: float) -> None:
        for name in waiting.action.cost.quotas:
            self._state.quotas[name].take(now, _requests(waiting, name))

    def _cells(self, group: CellGroup, now: float) -> None:
        node = self._state.nodes.get(group.node)
        if node is None:
            return
        if self._state.policy.pod_cores():
            self._static_shares(group, node, now)
            return
        needing: list[Waiting] = []
        reserved = 0
        for waiting in self._for_cells(group, node):
            if own_memory(waiting.action) > node.memory_free or self._held(waiting, group, now):
                continue
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

    def _for_cells(self, group: CellGroup, node: Node) -> list[Waiting]:
        """Return the waiting actions that the cells could run, were they all free."""
        return [w for w in self._state.floating_cells if self._could_run(w, node, "gpu", group) and self._fits_service(w, group)]

    def _bring_and_start(self, choice: Choice, group: CellGroup, node: Node, now: float) -> None:
        waiting = choice.waiting
        if own_memory(waiting.action) > node.memory_free or self._held(waiting, group, now):
            return
        instance = group.place_on(waiting.action.service or "", waiting.units)
        if instance is not None:
            self._start_on_cells(waiting, group, node, instance, now)
            return
        spec = self._state.services[waiting.action.service or ""]
        if group.full_of(spec):
            return
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
        for waiting in self._for_cells(group, node):
            if own_memory(waiting.action) > node.memory_free or self._held(waiting, group, now):
                continue
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
            if self._held(waiting, quota, now):
                if quota.opens_at(now) != now:
                    return
                continue
            node = self._least_busy("api", waiting)
            if node is None:
                continue
            quota.queue.remove(waiting)
            self._take_quotas(waiting, now)
            self.start_without_units(waiting, node, now)

    def forget_node(self, node: Node) -> None:
        """Look no more at the groups of a node that has gone, and count the static shares anew."""
        for group in (node.cores, node.cells):
            self._state.dirty.pop(group, None)
            for held in self._held_by_quota.values():
                held.pop(group, None)
        self._held_by_quota = {name: held for name, held in self._held_by_quota.items() if held}
        self._static_cells.clear()
        for other in self._state.nodes.values():
            for instance in other.cells.instances:
                if instance.pinned:
                    share = self._static_cells.get(instance.service, 0)
                    self._static_cells[instance.service] = share + len(instance.cell_ids)

    def _least_busy(self, pool: str, waiting: Waiting) -> Node | None:
        """Return the node of `pool` that runs the fewest actions, among those with the labels and the memory."""
        action, memory_mb = waiting.action, own_memory(waiting.action)
        nodes = [node for node in self._state.nodes.values() if node.offers(pool, action.requires) and node.memory_free >= memory_mb]
        return min(nodes, key=lambda node: len(node.running), default=None)

    def start_unplaced(self, now: float) -> None:
        """Start the actions that need nothing, wherever a node is up."""
        for waiting in list(self._state.unplaced):
            node = self._least_busy("cpu", waiting)
            if node is not None:
                self._state.unplaced.remove(waiting)
                self.start_without_units(waiting, node, now)

    def start_without_units(self, waiting: Waiting, node: Node, now: float) -> None:
        """Start an action that holds no cores or cells."""
        grant = Grant(node=node.spec.name, attempt=waiting.attempt + 1)
        self._state.start(waiting, grant, now, waiting.durations_s[0])


def _requests(waiting: Waiting, quota: str) -> int:
    return waiting.action.cost.least(f"{QUOTA_PREFIX}{quota}")
