"""What a restarted scheduler is told of the time before it: environments that stand, actions that run."""

from __future__ import annotations

from scheduler import events
from scheduler.environments import Environments
from scheduler.model import Environment, Running, ServiceSpec, Waiting
from scheduler.nodes import Nodes
from scheduler.state import State, memory_of


class Recovery:
    """Puts journaled facts back into the state. Nodes must have joined before."""

    def __init__(self, state: State, environments: Environments, nodes: Nodes) -> None:
        self._state = state
        self._environments = environments
        self._nodes = nodes

    def environment_opened(self, event: events.EnvironmentOpened, now: float) -> None:
        """Adopt an environment that stands on a node that is up."""
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
            pod_core_ids=event.pod_core_ids,
        )
        self._environments.adopt(environment, node, now)

    def resumed(self, event: events.Resumed, now: float) -> None:
        """Put a granted action back among the running ones; if its node is gone, it is lost or waits again."""
        state, action, grant = self._state, event.action, event.grant
        waiting = state.make_waiting(event.id, action, event.submitted_at, event.received_at)
        waiting.attempt = grant.attempt
        node = state.nodes.get(grant.node)
        if action.kind == "cpu.open":
            self._opening(waiting, event, now)
        environment = state.environments.get(action.environment or "")
        expected_end = event.granted_at + waiting.duration_s(grant.units) if grant.units in waiting.units else event.granted_at
        running = Running(waiting, grant, event.granted_at, expected_end, since=event.granted_at)
        state.running[waiting.id] = running
        for name in action.cost.quotas:
            state.quotas[name].take(now)
        if node is None:
            self._nodes.lose(running, f"node {grant.node} was lost while no scheduler ran", now)
            return
        node.running[waiting.id] = None
        if environment is not None and action.kind != "cpu.open":
            environment.actions[waiting.id] = None
            if action.session:
                environment.sessions[action.session] = waiting.id
            if action.kind == "cpu.close":
                environment.state = "closing"
        if grant.cell_ids:
            spec = state.services.get(action.service or "", ServiceSpec(name=action.service or ""))
            node.cells.adopt(spec, grant.cell_ids).active[waiting.id] = None
            node.cells.running[waiting.id] = running
        elif grant.core_ids and action.kind != "cpu.open":
            group = state.core_group(environment) if environment else node.cores
            group.claim(grant.core_ids)
            group.enter(running)

    def _opening(self, waiting: Waiting, event: events.Resumed, now: float) -> None:
        action = event.action
        environment = Environment(
            id=action.environment or "",
            job=action.job,
            trajectory=action.trajectory,
            memory_mb=memory_of(action),
            open_id=waiting.id,
            pod_core_ids=event.grant.core_ids,
            last_used=now,
        )
        self._environments.readopt_opening(environment, self._state.nodes.get(event.grant.node))
