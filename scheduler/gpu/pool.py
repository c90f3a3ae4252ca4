"""The pool of GPU cells: the cells of all nodes, the waiting actions, and the dispatcher that decides on instances.

Actions for models wait in one queue, since any node that has their service may run them. `residency.py` handles the workers'
reports of the instances on their cells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from scheduler.gpu.cells import CellGroup
from scheduler.gpu.residency import Residency
from scheduler.model import Grant, Running, ServiceSpec, Waiting
from scheduler.model.commands import Command, Start
from scheduler.model.queue import WaitQueue
from scheduler.model.state import Node, State, memory_of, own_memory, wants_cores
from scheduler.quotas.pool import QuotaPool
from tangram.action import CELLS, Action


class Dispatcher(Protocol):
    """Starts actions on cells, and decides which instances there are."""

    def hold_rounds(self, groups: list[CellGroup], now: float) -> None:
        """Start actions on changed cells. Each of the groups has cells."""

    def arrived(self, waiting: Waiting, now: float) -> None:
        """Take note of an action that has come in."""

    def node_gone(self) -> None:
        """Note that a node is gone."""

    def next_round(self) -> float | None:
        """Return when time alone makes a round necessary."""


MakeDispatcher = Callable[["GpuPool"], Dispatcher]


class GpuPool:
    """The groups of cells, by node."""

    def __init__(self, state: State, quotas: QuotaPool, dispatcher: MakeDispatcher) -> None:
        self.state = state
        self.quotas = quotas
        self.groups: dict[str, CellGroup] = {}
        self.queue = WaitQueue()
        self._changed: dict[CellGroup, None] = {}
        self._out: list[Command] = []
        self.residency = Residency(state, self.groups, self._out)
        self._dispatcher = dispatcher(self)

    def refusal(self, action: Action) -> str | None:
        """Return why an action could never have its cells."""
        if wants_cores(action):
            return "asks for cores and for GPU cells; one action is granted only one of them"
        service = self.state.services.get(action.service or "")
        if service is None:
            return f"service {action.service!r} is not declared"
        asked = action.cost.amounts.get(CELLS, service.cells)
        able = [amount for amount in asked if service.sizes is None or amount in service.sizes]
        if not able:
            return f"service {service.name} runs on {_listed(service.sizes or ())} cells, not on {_listed(asked)}"
        there = [group for group in self.groups.values() if "gpu" in group.node.spec.pools]
        if not there:
            return None
        groups = [group for group in there if group.node.offers("gpu", action.requires)]
        if not groups:
            return f"no node with GPUs has the labels {', '.join(action.requires)}"
        serving = [group for group in groups if group.node.serves(service.name)]
        if not serving:
            return None if self.residency.is_away(service.name) else f"no node that is up declares service {service.name!r}"
        return self._room_refusal(serving, service, min(able), memory_of(action))

    def _room_refusal(self, groups: Sequence[CellGroup], service: ServiceSpec, cells: int, own_mb: int) -> str | None:
        """Return why no node can ever hold an instance on `cells` cells and run an action with `own_mb` of memory."""
        most = max(group.capacity for group in groups)
        if cells > most:
            return f"needs {cells} cells, the largest node has {most}"
        memory_mb = max(group.cell_memory_mb for group in groups if group.capacity)
        if service.memory_mb > memory_mb:
            return f"service {service.name} needs {service.memory_mb} MB per cell, a cell has {memory_mb} MB"
        most_mb = max(group.node.spec.memory_mb for group in groups)
        if own_mb > most_mb:
            return f"needs {own_mb} MB, the largest node has {most_mb} MB"
        if not any(
            group.capacity >= cells and group.cell_memory_mb >= service.memory_mb and group.node.spec.memory_mb >= own_mb
            for group in groups
        ):
            return f"no node has {cells} cells of {service.memory_mb} MB for service {service.name}, and {own_mb} MB beside them"
        services = len(self.state.services)
        share = sum(group.capacity for group in self.groups.values()) // max(1, services)
        if self.state.rules.owned_cells and cells > share:
            return f"needs {cells} cells, equal parts of all cells are {share} for each of {services} services"
        return None

    def enqueue(self, waiting: Waiting, now: float) -> None:
        """Take in an action for a model."""
        self.queue.add(waiting)
        self._dispatcher.arrived(waiting, now)
        self._touch_all()

    def withdraw(self, waiting: Waiting) -> None:
        """Take a waiting action out of the queue. All cells get a round, since the action may have held up other actions."""
        self.queue.remove(waiting)
        self._touch_all()

    def _touch_all(self) -> None:
        for group in self.groups.values():
            if group.capacity:
                group.touch()

    def release(self, running: Running, now: float) -> None:
        """Take back the place of an action on its instance."""
        group = self.groups.get(running.grant.node)
        if group is None or not running.grant.cell_ids:
            return
        group.running.pop(running.waiting.id, None)
        instance = group.instance_of(running.waiting.id)
        if instance is not None:
            del instance.active[running.waiting.id]
        group.touch()

    def resume(self, running: Running, now: float) -> list[Command]:
        """Take in an action that an earlier scheduler started, with its instance."""
        if not running.grant.cell_ids:
            return []
        service, action_id = running.waiting.action.service or "", running.waiting.id
        spec = self.state.services.get(service, ServiceSpec(name=service))
        group = self.groups[running.grant.node]
        instance = group.adopt(spec, running.grant.cell_ids)
        instance.active[action_id] = None
        instance.pinned = spec.pinned or self.state.rules.owned_cells
        group.running[action_id] = running
        group.touch()
        return []

    def joined(self, node: Node) -> None:
        """Take in the cells of a node."""
        self.groups[node.spec.name] = CellGroup(node, self._changed, sharing=self.state.rules.shares_cells)
        self._touch_all()

    def gone(self, node: Node) -> None:
        """Forget the cells of a node."""
        group = self.groups.pop(node.spec.name)
        self._changed.pop(group, None)
        self.quotas.forget(group)
        self._dispatcher.node_gone()
        self._touch_all()

    def look_again(self, node: Node) -> None:
        """Look again at the cells of a node: actions that waited for its memory, or for it to take something new, may start."""
        self.groups[node.spec.name].touch()

    @property
    def changed(self) -> bool:
        """Whether `allocate` would hold a round."""
        return bool(self._changed)

    def allocate(self, now: float) -> list[Command]:
        """Start actions on changed cells."""
        groups = [group for group in self._changed if group.capacity]
        self._changed.clear()
        if groups:
            self._dispatcher.hold_rounds(groups, now)
        out = self._out.copy()
        self._out.clear()
        return out

    def wake(self, now: float) -> None:
        """Bring the warm services of nodes that have joined, and look again at all cells if the dispatcher's time has come."""
        self.residency.warm_up(now)
        at = self._dispatcher.next_round()
        if at is not None and at <= now:
            self._touch_all()

    def next_wake(self, now: float) -> float | None:
        """Return when the dispatcher's time comes, or warm services are to be brought."""
        times = (self._dispatcher.next_round(), self.residency.next_warm())
        return min([at for at in times if at is not None], default=None)

    def start(self, waiting: Waiting, grant: Grant, now: float, expected_s: float) -> Running:
        """Start an action; its dispatcher takes it out of the queue."""
        self._out.append(Start(id=waiting.id, grant=grant))
        return self.state.start(waiting, grant, now, expected_s)


def can_run(waiting: Waiting, group: CellGroup, state: State) -> bool:
    """Say whether a node, were it all free, could run an action on its cells."""
    action, node = waiting.action, group.node
    spec = state.services.get(action.service or "")
    if spec is None or not (node.heard and node.serves(spec.name) and node.takes("gpu", action.requires)):
        return False
    return waiting.least <= group.capacity and spec.memory_mb <= group.cell_memory_mb and own_memory(action) <= node.spec.memory_mb


def _listed(values: Sequence[int]) -> str:
    return " or ".join(str(value) for value in values)
