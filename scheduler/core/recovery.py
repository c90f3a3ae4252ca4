"""What a restarted scheduler is told of the time before it: environments that stand, actions that run."""

from __future__ import annotations

from dataclasses import replace

from scheduler.core.environments import CLOSED, Environments
from scheduler.core.nodes import Nodes
from scheduler.core.state import Node, State, memory_of, own_memory
from scheduler.cpu.cores import CoreGroup
from scheduler.model import Environment, QuotaSpec, Running, ServiceSpec, Waiting, events
from scheduler.model.commands import Resize
from scheduler.quotas.account import QuotaState
from tangram.action import CORES, Action


class Recovery:
    """Puts journaled facts back into the state. Nodes must have joined before."""

    def __init__(self, state: State, environments: Environments, nodes: Nodes) -> None:
        self._state = state
        self._environments = environments
        self._nodes = nodes

    def environment_opened(self, event: events.EnvironmentOpened, now: float) -> None:
        """Adopt an environment that stands on a node that is up, with its pod where the policy has pods."""
        node = self._state.nodes.get(event.node)
        if node is None or event.id in self._state.environments:
            return
        environment = Environment(
            id=event.id,
            job=event.job,
            trajectory=event.trajectory,
            memory_mb=event.memory_mb,
            open_id="",
            node=event.node,
            pod_core_ids=event.pod_core_ids if self._state.policy.pod_cores() else (),
            life=self._state.work_left.resume(event.job, event.id),
            client=event.client,
            close_requested=event.closing,
        )
        environment.ended_work_s = environment.life.work_s
        self._environments.adopt(environment, node, event.used_at, now)

    def resumed(self, event: events.Resumed, now: float) -> None:
        """Put a granted action back among the running ones; if its node is gone, it is lost or waits again."""
        state, action, grant = self._state, event.action, event.grant
        if event.id in state.running or event.id in state.waiting:
            return
        waiting = state.make_waiting(event.id, action, event.submitted_at, event.received_at)
        waiting.attempt = grant.attempt
        node = state.nodes.get(grant.node)
        if action.kind == "cpu.open":
            self._opening(waiting, event, now)
        environment = state.environments.get(action.environment or "")
        expected_end = event.granted_at + waiting.duration_s(grant.units) if grant.units in waiting.units else event.granted_at
        self._declare_quotas(action)
        draws = state.draws(action)
        if draws:  # the journal does not know when it was told to go
            grant = replace(grant, not_before=event.granted_at + max(account.spec.lead_s for account, _, _ in draws))
        since = event.granted_at if event.resized_at is None else event.resized_at
        running = Running(waiting, grant, event.granted_at, expected_end, since=since, held_since=since)
        state.running[waiting.id] = running
        state.count(running, 1)
        for account, requests, tokens in draws:
            account.take(running.goes_at, requests, tokens)
        if node is None:
            self._nodes.lose(running, f"node {grant.node} was lost while no scheduler ran", now)
            return
        node.running[waiting.id] = None
        node.memory_free -= own_memory(action)
        if environment is not None and action.kind == "cpu.close":
            environment.state, environment.close_requested = "closing", environment.close_requested or CLOSED
        elif environment is not None and action.kind != "cpu.open":
            self._adopt_into(environment, running)
        if grant.cell_ids:
            self._adopt_cells(running, node)
        elif (grant.core_ids or grant.background) and action.kind != "cpu.open":
            self._adopt_cores(running, state.core_group(environment) if environment else node.cores, now)

    def _adopt_into(self, environment: Environment, running: Running) -> None:
        """Count an action to its environment; where that is being closed, the action is being stopped."""
        action, action_id = running.waiting.action, running.waiting.id
        environment.actions[action_id] = None
        if action.session:
            environment.sessions[action.session] = action_id
        if environment.state == "closing":
            running.stopping = f"environment {environment.id} is being closed"

    def spent(self, event: events.Spent) -> None:
        """Count what an action has taken of its quotas that has ended."""
        self._declare_quotas(event.action)
        for account, requests, tokens in self._state.draws(event.action):
            account.spend(event.at + account.spec.lead_s, requests, tokens)

    def _declare_quotas(self, action: Action) -> None:
        """Take up quotas that were declared when the action was granted and are no longer."""
        for name in action.cost.quotas:
            self._state.quotas.setdefault(name, QuotaState(QuotaSpec(name=name)))

    def _adopt_cells(self, running: Running, node: Node) -> None:
        service, action_id = running.waiting.action.service or "", running.waiting.id
        spec = self._state.services.get(service, ServiceSpec(name=service))
        instance = node.cells.adopt(spec, running.grant.cell_ids)
        instance.active[action_id] = None
        instance.pinned = spec.pinned or bool(self._state.policy.pod_cores())
        node.cells.running[action_id] = running
        self._state.touch(node.cells)

    def _adopt_cores(self, running: Running, group: CoreGroup, now: float) -> None:
        """Claim the cores of a grant. What another grant has claimed is its own: cores are given back only once."""
        waiting, grant = running.waiting, running.grant
        if grant.background and self._state.policy.ranks:  # preemption or not, it wants a core
            group.to_background(running)
            self._state.contend(waiting, group.queue, now)
            self._state.touch(group)
            return
        running.grant = replace(grant, core_ids=group.claim(grant.core_ids), background=False)
        if grant.background:  # this policy knows none: it runs beside what has cores, as if it had been granted none to begin with
            self._state.out.append(
                Resize(id=waiting.id, node=grant.node, attempt=grant.attempt, core_ids=(), units=grant.units, background=False)
            )
        self._state.shares.hold(waiting.action.job, CORES, len(running.grant.core_ids) - len(grant.core_ids))
        group.adopt(running, resizes=self._state.policy.resizes)
        self._state.touch(group)

    def _opening(self, waiting: Waiting, event: events.Resumed, now: float) -> None:
        action = event.action
        environment = Environment(
            id=action.environment or "",
            job=action.job,
            trajectory=action.trajectory,
            memory_mb=memory_of(action),
            open_id=waiting.id,
            pod_core_ids=event.grant.core_ids if self._state.policy.pod_cores() else (),
            last_used=now,
            client="" if action.detached else action.client,
            close_requested=event.close_requested,
        )
        self._environments.readopt_opening(environment, self._state.nodes.get(event.grant.node))
