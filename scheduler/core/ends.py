"""How a running action ends: out of every index, its units given back, its end noted.

What is not pretty: an end touches four indexes (running, its group, its node, its environment), and they are kept
by hand, here.
"""

from __future__ import annotations

from scheduler.core.dispatch import Dispatcher
from scheduler.core.state import State, own_memory, wants_cores
from scheduler.cpu.cores import CoreGroup
from scheduler.gpu.cells import CellGroup
from scheduler.learning.durations import MEASURED
from scheduler.model import Running, events
from scheduler.model.commands import Finish
from scheduler.model.lifecycle import End


class Ends:
    """Takes grants back."""

    def __init__(self, state: State, dispatcher: Dispatcher) -> None:
        self._state = state
        self._dispatcher = dispatcher

    def release(self, running: Running, now: float) -> None:
        """Take a running action out of every index and give its units back."""
        state, action, grant = self._state, running.waiting.action, running.grant
        running.held(now)
        del state.running[running.waiting.id]
        state.count(running, -1)
        node = state.nodes.get(grant.node)
        for account, requests, _ in state.draws(action):
            account.give_back(requests)
        if action.cost.quotas:
            self._dispatcher.holds.open(now)
        if node is None:
            return
        node.running.pop(running.waiting.id, None)
        state.give_memory(node, own_memory(action))
        if grant.cell_ids:
            self._release_cells(running, node.cells)
        elif wants_cores(action) and action.kind != "cpu.open":  # even without any: another grant may have named the same ones
            environment = state.environments.get(action.environment or "")
            self._release_cores(running, state.core_group(environment) if environment else node.cores, now)

    def _release_cells(self, running: Running, group: CellGroup) -> None:
        group.running.pop(running.waiting.id, None)
        instance = group.instance_of(running.waiting.id)
        if instance is not None:
            del instance.active[running.waiting.id]
        self._state.touch(group)

    def _release_cores(self, running: Running, group: CoreGroup, now: float) -> None:
        group.leave(running)
        self._state.touch(group)
        if self._state.policy.pod_cores():
            self._state.room_returned = True

    def learn(self, running: Running, finished: events.Finished) -> None:
        """Have the durations learn from an action that succeeded."""
        waiting, execution_s = running.waiting, finished.execution_s
        held_s = max(running.held_since - running.granted_at - running.background_s_at(running.held_since), 1e-9)
        held_units = waiting.unit_s / held_s if waiting.attempt == 1 and waiting.unit_s else float(running.grant.units)
        # Once resized, what was done is the sum over its grants; else it is what the worker timed.
        resized = (running.since > running.granted_at or running.grant.background) and running.done_s > 0
        work_s = running.done_at(running.held_since) if resized else execution_s * running.speed
        cpu_s = finished.cpu_s if waiting.action.kind == MEASURED else None
        self._state.durations.observe(
            waiting.action, waiting.estimate, work_s=work_s, held_units=held_units, execution_s=execution_s, cpu_s=cpu_s
        )

    def note_end(
        self, running: Running, status: End, reason: str, now: float, *, finished: events.Finished | None, environment_lost_on: str = ""
    ) -> None:
        """Note the end of a running action; `finished` is what its worker said, None where it said nothing."""
        waiting = running.waiting
        held_s = now - running.granted_at
        waited_s = min(finished.waited_s, held_s) if finished else 0.0
        queue_s = running.granted_at - waiting.received_at + waited_s
        execution_s = min(finished.execution_s, held_s - waited_s) if finished else 0.0
        overhead_s = max(0.0, now - waiting.submitted_at - queue_s - execution_s)
        self._state.out.append(
            Finish(
                id=waiting.id,
                status=status,
                reason=reason,
                by_worker=finished is not None,
                started_at=finished.started_at if finished and finished.started_at is not None else running.started_at,
                queue_s=queue_s,
                overhead_s=overhead_s,
                execution_s=execution_s,
                cpu_s=finished.cpu_s if finished else 0.0,
                dop=running.grant.units,
                unit_s=waiting.unit_s,
                environment_lost_on=environment_lost_on,
            )
        )
