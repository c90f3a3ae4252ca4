"""GPU cells: actions run on a resident instance of their service, or have one brought onto the cells first."""

from __future__ import annotations

from collections.abc import Iterator

from scheduler.gpu.cells import CellGroup, Instance
from scheduler.holds import Holds
from scheduler.lanes.cores import could_run
from scheduler.model import Evicted, Grant, Waiting
from scheduler.policies.abstract import Choice
from scheduler.state import Node, State, own_memory


class Cells:
    """Starts actions on instances, and decides which instances there are."""

    def __init__(self, state: State, holds: Holds) -> None:
        self._state = state
        self._holds = holds
        self._static_cells: dict[str, int] = {}
        self._started: list[Waiting] = []

    def came(self, waiting: Waiting, now: float) -> None:
        """Take note of an action that has come in for the first time."""

    def next_look(self) -> float | None:
        """Return when a look would change something though nothing else has happened."""
        return None

    def woken(self) -> None:
        """Ask for no look until the next one says when: where no node has cells any more there is none."""

    def look(self, group: CellGroup, node: Node, now: float) -> None:
        """Start what can start on the cells of a node."""
        if not group.has_room:
            return
        if self._state.policy.pod_cores():
            self._static_shares(group, node, now)
        else:
            self._share_out(group, node, now)
        self._take_out()

    def _others_changed(self) -> list[Node]:
        """Return the other nodes whose cells are still to be looked at, and have them looked at no more."""
        changed = [group for group in self._state.dirty if isinstance(group, CellGroup)]
        for group in changed:
            del self._state.dirty[group]
        return [self._state.nodes[group.node] for group in changed if group.node in self._state.nodes]

    def _take_out(self) -> None:
        """Take those that were started out of the queue: not before, for no walk over it may see it change."""
        for waiting in self._started:
            self._state.floating_cells.remove(waiting)
        self._started.clear()

    def _share_out(self, group: CellGroup, node: Node, now: float) -> None:
        needing: list[Waiting] = []
        reserved = 0
        for waiting in self._for_cells(group, node, now):
            if own_memory(waiting.action) > node.memory_free or self._holds.held(waiting, group, now):
                continue
            instance = group.place_on(waiting.action.service or "", waiting.units)
            if instance is not None and (instance.active or instance.pinned or group.free - len(instance.cell_ids) >= reserved):
                self._start_on_cells(waiting, group, node, instance, now)
                continue
            spec = self._state.services[waiting.action.service or ""]
            if group.full_of(spec) or any(other.action.service == spec.name for other in needing if spec.instances_per_node):
                continue
            wanted = self._state.policy.wanted(waiting, group.most)
            if wanted > group.most:  # those behind need not wait for what pinned services never leave
                continue
            if reserved + wanted > group.free:
                break
            needing.append(waiting)
            reserved += wanted
        if needing:
            for choice in self._state.policy.choose(needing, [], group.free, group, now):
                self._bring_and_start(choice, group, node, now)

    def _for_cells(self, group: CellGroup, node: Node, now: float) -> Iterator[Waiting]:
        """Walk the waiting actions that the cells could run, were they all free."""
        for waiting in self._state.in_order([self._state.floating_cells], now):
            if could_run(waiting, node, "gpu", group) and self._fits_service(waiting, group):
                yield waiting

    def _bring_and_start(self, choice: Choice, group: CellGroup, node: Node, now: float) -> None:
        waiting = choice.waiting
        if own_memory(waiting.action) > node.memory_free or self._holds.held(waiting, group, now):
            return
        instance = group.place_on(waiting.action.service or "", waiting.units)
        if instance is not None:
            self._start_on_cells(waiting, group, node, instance, now)
            return
        spec = self._state.services[waiting.action.service or ""]
        if group.full_of(spec):
            return
        instance, eviction = group.bring(spec, choice.units)
        self._start_on_cells(waiting, group, node, instance, now, evict=eviction.evicted, restore_s=spec.restore_s)

    def _start_on_cells(
        self,
        waiting: Waiting,
        group: CellGroup,
        node: Node,
        instance: Instance,
        now: float,
        *,
        evict: tuple[Evicted, ...] = (),
        restore_s: float | None = None,
    ) -> None:
        self._started.append(waiting)
        instance.active[waiting.id] = None
        instance.last_used = now
        self._holds.take(waiting, now)
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
        for waiting in self._for_cells(group, node, now):
            if own_memory(waiting.action) > node.memory_free or self._holds.held(waiting, group, now):
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

    def _fits_service(self, waiting: Waiting, group: CellGroup) -> bool:
        service = self._state.services.get(waiting.action.service or "")
        return service is not None and service.memory_mb <= group.cell_memory_mb

    def count_shares(self) -> None:
        """Count the static shares anew, after a node has gone."""
        self._static_cells.clear()
        for node in self._state.nodes.values():
            for instance in node.cells.instances:
                if instance.pinned:
                    share = self._static_cells.get(instance.service, 0)
                    self._static_cells[instance.service] = share + len(instance.cell_ids)
