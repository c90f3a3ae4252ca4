"""Recovery: a restarted scheduler takes in standing environments and running actions from the journal."""

from __future__ import annotations

from scheduler.core.environments import CLOSED, Environments
from scheduler.core.nodes import Nodes
from scheduler.core.pools import Pools
from scheduler.model import Environment, EnvironmentFacts, Running, Waiting, events
from scheduler.model.commands import Command
from scheduler.model.copied import shared
from scheduler.model.state import State, opened_by


class Recovery:
    """Puts journaled facts back into the state. Nodes must have joined before."""

    def __init__(self, state: State, pools: Pools, environments: Environments, nodes: Nodes, out: list[Command]) -> None:
        self._state = state
        self._pools = pools
        self._environments = environments
        self._nodes = nodes
        self._out = out

    def environment_opened(self, event: events.EnvironmentOpened, now: float) -> None:
        """Adopt an environment that stands on a node that is up, with its pod if the policy has pods."""
        node = self._state.nodes.get(event.node)
        if node is None or event.id in self._state.environments:
            return
        environment = Environment(
            **shared(EnvironmentFacts, event),
            open_id="",
            pod_core_ids=event.pod_core_ids if self._state.rules.pod_cores else (),
            life=self._pools.cpu.ranking.resume(event.job, event.id),
            close_requested=event.closing,
        )
        environment.ended_work_s = environment.life.work_s
        self._environments.adopt(environment, node, event.used_at, now)

    def resumed(self, event: events.Resumed, now: float) -> None:
        """Put a granted action back among the running actions. If its node is gone, the action has `ended`, is lost, or waits again."""
        state, action, grant = self._state, event.action, event.grant
        if event.id in state.running or event.id in state.waiting:
            return
        waiting = state.make_waiting(event.id, action, event.submitted_at, event.received_at)
        waiting.attempt, waiting.unit_s = grant.attempt, event.unit_s
        node = state.nodes.get(grant.node)
        if action.kind == "cpu.open":
            self._opening(waiting, event, now)
        environment = state.environments.get(action.environment or "")
        expected_end = event.granted_at + waiting.duration_s(grant.units) if grant.units in waiting.units else event.granted_at
        since = event.granted_at if event.resized_at is None else event.resized_at
        running = Running(waiting, grant, event.granted_at, expected_end, since=since, held_since=since)
        running.work_is_known = event.resized_at is None
        state.running[waiting.id] = running
        state.count(running, 1)
        self._pools.quotas.resume(running, now)
        if node is None:
            self._nodes.lose(running, f"node {grant.node} was lost while no scheduler ran", now, event.ended)
            return
        state.occupy(running, node)
        if environment is not None and action.kind == "cpu.close":
            environment.state, environment.close_requested = "closing", environment.close_requested or CLOSED
            environment.cause = environment.end_cause
        elif environment is not None and action.kind != "cpu.open":
            self._adopt_into(environment, running)
        pool = self._pools.of(action)
        if pool is not self._pools.quotas:
            self._out += pool.resume(running, now)

    def _adopt_into(self, environment: Environment, running: Running) -> None:
        """Add an action to its environment. If the environment is being closed, the action is being stopped."""
        action, action_id = running.waiting.action, running.waiting.id
        environment.actions[action_id] = None
        if action.session:
            environment.sessions[action.session] = action_id
        if environment.state == "closing":
            running.stopping, running.stop_cause = f"environment {environment.id} is being closed", environment.end_cause

    def _opening(self, waiting: Waiting, event: events.Resumed, now: float) -> None:
        environment = opened_by(waiting, now)
        environment.pod_core_ids = event.grant.core_ids if self._state.rules.pod_cores else ()
        environment.close_requested, environment.cause = event.close_requested, event.close_cause
        self._environments.readopt_opening(environment, self._state.nodes.get(event.grant.node))
