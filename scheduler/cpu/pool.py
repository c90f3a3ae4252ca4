"""The pool of cores: the cores of all nodes, the actions that wait for them, and the dispatcher that gives them out.

| an action needs | it waits in |
|---|---|
| cores, in an environment | the queue of the cores of its node, or of its pod |
| cores, anywhere | `floating`: any node of the pool `cpu` may run it |
| nothing that is counted | `unplaced`, while there is no node |

Under a policy with pods, each environment takes cores out of its node's group for its whole life, and forms its own group.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from scheduler.cpu.cores import CoreGroup
from scheduler.cpu.ranking import Ranking
from scheduler.cpu.tuning import TUNING
from scheduler.learning.durations import Observation
from scheduler.model import Environment, Grant, Running, Waiting
from scheduler.model.commands import Command, Resize, Start
from scheduler.model.queue import Contenders, WaitQueue
from scheduler.model.state import Node, State, own_memory, wants_cores
from scheduler.quotas.pool import QuotaPool
from tangram.action import CORES, Action


class CoreDispatcher(Protocol):
    """Gives out the cores of one group."""

    def run(self, group: CoreGroup, now: float) -> None:
        """Hold a round over a group in which something has changed."""


MakeDispatcher = Callable[["CpuPool"], CoreDispatcher]


class CpuPool:
    """The groups of cores, by node and by the environment that has a pod."""

    def __init__(self, state: State, quotas: QuotaPool, dispatcher: MakeDispatcher, history: Sequence[Observation] = ()) -> None:
        self.state = state
        self.quotas = quotas
        self.ranking = Ranking(state, history)
        self.groups: dict[str, CoreGroup] = {}
        self.pods: dict[str, CoreGroup] = {}
        self.floating = Contenders()
        self.unplaced = WaitQueue()
        self.cores_returned = 0
        """How often cores came back to the group of a node. Opens that wait for room for a pod compare two readings of it."""
        self._changed: dict[CoreGroup, None] = {}
        self._out: list[Command] = []
        self._rounds: list[tuple[float, int, CoreGroup]] = []
        self._rounds_asked = 0
        self._place_unplaced = False
        self._dispatcher = dispatcher(self)

    def group_of(self, environment: Environment | None, node: Node) -> CoreGroup:
        """Return the cores for the actions of an environment; without an environment, the cores of the node."""
        pod = self.pods.get(environment.id) if environment is not None else None
        return pod if pod is not None else self.groups[node.spec.name]

    def queues_of(self, group: CoreGroup) -> list[Contenders]:
        """Return the queues whose actions may start on a group: its queue, and `floating` on a node that takes actions."""
        floats = group.node.takes_new and group is self.groups[group.node.spec.name]
        return [group.queue, self.floating] if floats else [group.queue]

    def group_of_action(self, action: Action) -> CoreGroup | None:
        """Return the cores of the environment that an action names; None if it has no node."""
        environment = self.state.environments.get(action.environment or "")
        node = self.state.nodes.get(environment.node or "") if environment is not None else None
        return self.group_of(environment, node) if node is not None else None

    # The pool

    def refusal(self, action: Action) -> str | None:
        """Return why an action could never have its cores, in its environment or on any node."""
        if action.environment is not None and action.kind != "cpu.open":
            group = self.group_of_action(action)
            if group is not None and action.cost.least(CORES) > group.capacity:
                return f"needs {action.cost.least(CORES)} cores, its environment can have {group.capacity}"
            return None
        pod_cores = (self.state.rules.pod_cores or 0) if action.environment is not None else 0
        return self.state.refusal(action, "cpu", max(action.cost.least(CORES), pod_cores))

    def enqueue(self, waiting: Waiting, now: float) -> None:
        """Take in an action that wants cores, or nothing."""
        if not wants_cores(waiting.action):
            self.unplaced.add(waiting)
            self._place_unplaced = True
            return
        group = self.group_of_action(waiting.action)
        self.ranking.enter(waiting, self.floating if group is None else group.queue, now)
        self._touch_groups_for(waiting.action, group)

    def withdraw(self, waiting: Waiting) -> None:
        """Take a waiting action out of its queue. Its groups get a round, since it may have held up other actions."""
        if self.unplaced.remove(waiting):
            return
        group = self.group_of_action(waiting.action)
        if group is None:
            self.floating.remove(waiting)
        else:
            group.queue.remove(waiting)
        self._touch_groups_for(waiting.action, group)

    def _touch_groups_for(self, action: Action, group: CoreGroup | None) -> None:
        if group is not None:
            group.touch()
            return
        for node in self.state.nodes.values():
            if node.takes("cpu", action.requires):
                self.groups[node.spec.name].touch()

    def release(self, running: Running, now: float) -> None:
        """Take the cores of an action back.

        An action without cores is forgotten, too: another grant may hold the cores that its grant named.
        """
        node = self.state.nodes.get(running.grant.node)
        if node is None or not wants_cores(running.waiting.action) or running.waiting.action.kind == "cpu.open":
            return
        group = self.group_of(self.state.environments.get(running.waiting.action.environment or ""), node)
        group.leave(running)
        group.touch()
        self.cores_returned += 1

    def resume(self, running: Running, now: float) -> list[Command]:
        """Take in an action that an earlier scheduler started, with its cores.

        Cores that another grant has taken stay with that grant.
        """
        waiting, grant, node = running.waiting, running.grant, self.state.nodes[running.grant.node]
        if waiting.action.kind == "cpu.open" or not (grant.core_ids or grant.background):
            return []
        group = self.group_of(self.state.environments.get(waiting.action.environment or ""), node)
        group.touch()
        if grant.background and self.state.rules.ranks:  # it wants a core, even without preemption
            group.to_background(running)
            self.ranking.enter(waiting, group.queue, now)
            return []
        running.grant = replace(grant, core_ids=group.claim(grant.core_ids), background=False)
        self.state.shares.hold(waiting.action.job, CORES, len(running.grant.core_ids) - len(grant.core_ids))
        group.adopt(running, resizes=self.state.rules.resizes)
        # A policy without a background lets the action run beside actions with cores, like an action that was granted none.
        return [_resize(running)] if grant.background else []

    def joined(self, node: Node) -> None:
        """Take in the cores of a node."""
        group = self.groups[node.spec.name] = CoreGroup(node, node.spec.core_domains(), self._changed)
        group.touch()
        self._place_unplaced = True

    def gone(self, node: Node) -> None:
        """Forget the cores of a node."""
        group = self.groups.pop(node.spec.name)
        group.next_round = math.inf
        self._changed.pop(group, None)
        self.quotas.forget(group)

    def look_again(self, node: Node) -> None:
        """Look again at the actions that wait for a node's memory, or for it to take something new."""
        self.groups[node.spec.name].touch()
        self._place_unplaced = True

    @property
    def changed(self) -> bool:
        """Whether `allocate` would hold a round."""
        return bool(self._changed)

    def allocate(self, now: float) -> list[Command]:
        """Give out cores anew wherever something has changed, but none of a silent node."""
        if self._place_unplaced:
            self._start_unplaced(now)
        while self._changed:
            group = next(iter(self._changed))
            del self._changed[group]
            if not group.node.silent:
                self._dispatcher.run(group, now)
        out, self._out = self._out, []
        return out

    def _start_unplaced(self, now: float) -> None:
        """Start the actions that need nothing, wherever a node is up."""
        self._place_unplaced = False
        for waiting in list(self.unplaced):
            node = self.state.least_busy("cpu", waiting)
            if node is not None:
                self.unplaced.remove(waiting)
                self.start(waiting, Grant(node=node.spec.name, attempt=waiting.attempt + 1), now, waiting.durations_s[0])

    def wake(self, now: float) -> None:
        """Hold the rounds whose time has come."""
        while (at := self.next_wake(now)) is not None and at <= now:
            group = heapq.heappop(self._rounds)[2]
            group.next_round = math.inf
            group.touch()

    def next_wake(self, now: float) -> float | None:
        """Return when the next round is due without an event."""
        while self._rounds and self._rounds[0][2].next_round != self._rounds[0][0]:
            heapq.heappop(self._rounds)
        return self._rounds[0][0] if self._rounds else None

    # Decisions of the dispatchers

    def start(self, waiting: Waiting, grant: Grant, now: float, expected_s: float) -> Running:
        """Start an action that is out of its queue."""
        self._out.append(Start(id=waiting.id, grant=grant))
        return self.state.start(waiting, grant, now, expected_s)

    def regrant(self, running: Running, core_ids: tuple[int, ...], now: float) -> None:
        """Have a running action hold these cores from now on; without cores, it goes on in the background."""
        before = running.grant
        running.regrant(replace(before, units=len(core_ids) or before.units, core_ids=core_ids, background=not core_ids), now)
        self.state.shares.hold(running.waiting.action.job, CORES, len(core_ids) - len(before.core_ids))
        self._out.append(_resize(running))

    def hold_round_at(self, group: CoreGroup, at: float) -> None:
        """Have a round held over a group at `at`, unless a round is due earlier."""
        if at < group.next_round:
            group.next_round = at
            self._rounds_asked += 1
            heapq.heappush(self._rounds, (at, self._rounds_asked, group))

    def unqueue(self, waiting: Waiting, group: CoreGroup) -> None:
        """Take an action that starts on a group out of its queue."""
        if not group.queue.remove(waiting):
            self.floating.remove(waiting)

    # Reports of actions

    def used(self, running: Running, cpu_s: float, now: float) -> None:
        """Take in the core-seconds that an action has got in the background, and rank it anew."""
        node = self.state.nodes.get(running.grant.node)
        running.note_background(min(cpu_s, (now - running.granted_at) * (node.spec.cores if node is not None else 1)))
        group = self.group_of_action(running.waiting.action)
        if group is not None and running.waiting.id in group.background:
            self.ranking.note(running, now)
            self.ranking.renew(running.waiting, group.queue)
            group.touch()

    # Memory

    def pause(self, running: Running, now: float) -> None:
        """Take the cores of an action that waits for memory. An action that is not preemptible keeps them."""
        waiting, group = running.waiting, self.group_of_action(running.waiting.action)
        if group is None or waiting.id not in group.running or not waiting.preemptible:
            return
        core_ids = running.grant.core_ids
        if core_ids:
            self.ranking.note(running, now)
            self.regrant(running, (), now)
            group.give_back(core_ids)
            if now >= running.on_cores_since + TUNING.turn_s:
                waiting.contends_since = now
        group.pause(running)
        group.touch()

    def go_on(self, running: Running) -> None:
        """Let an action whose memory has come contend for cores again, from its old place."""
        group = self.group_of_action(running.waiting.action)
        if group is None or group.paused.pop(running.waiting.id, None) is None:
            return
        group.to_background(running)
        self.ranking.enter(running.waiting, group.queue, running.waiting.contends_since)
        group.touch()

    # Pods

    def take_pod(self, environment: Environment, node: Node, cores: int) -> None:
        """Give an environment cores of its own."""
        environment.pod_core_ids = self.groups[node.spec.name].take(cores)
        self._make_pod(environment, node)

    def resume_pod(self, environment: Environment, node: Node) -> None:
        """Give an environment the free ones of the cores that it had under an earlier scheduler."""
        if environment.pod_core_ids:
            environment.pod_core_ids = self.groups[node.spec.name].claim(environment.pod_core_ids)
            self._make_pod(environment, node)

    def _make_pod(self, environment: Environment, node: Node) -> None:
        group = self.groups[node.spec.name]
        group.resize(-len(environment.pod_core_ids))
        self.pods[environment.id] = group.pod(environment.pod_core_ids)

    def environment_gone(self, environment: Environment, node: Node | None) -> None:
        """Take back the cores of an environment that was on `node`.

        None means that the node is gone, or that the environment had no node.
        """
        pod = self.pods.pop(environment.id, None)
        if pod is not None:
            self._changed.pop(pod, None)
            self.quotas.forget(pod)
        if node is None:
            return
        group = self.groups[node.spec.name]
        group.touch()
        if environment.pod_core_ids:
            group.resize(len(environment.pod_core_ids))
            group.give_back(environment.pod_core_ids)
            self.cores_returned += 1


def could_run(waiting: Waiting, node: Node, cores: int) -> bool:
    """Say whether a node with `cores` free cores could run an action that is bound to no node."""
    action = waiting.action
    return node.takes("cpu", action.requires) and waiting.least <= cores and own_memory(action) <= node.spec.memory_mb


def _resize(running: Running) -> Resize:
    """Return the command that tells the worker of an action about its grant."""
    grant = running.grant
    return Resize(
        id=running.waiting.id,
        node=grant.node,
        attempt=grant.attempt,
        core_ids=grant.core_ids,
        units=grant.units,
        background=grant.background,
    )
