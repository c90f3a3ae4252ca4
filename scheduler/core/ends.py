"""The end of an action: take it out of every index, give its units back, note its end."""

from __future__ import annotations

from scheduler.core.breaker import Breaker
from scheduler.core.memory import Memory
from scheduler.core.pools import Pools
from scheduler.learning.durations import MEASURED
from scheduler.model import Running, Waiting, events
from scheduler.model.commands import Command, Finish, Stop
from scheduler.model.lifecycle import End
from scheduler.model.state import State, own_memory


class Ends:
    """Takes grants back, and notes ends in `out`."""

    def __init__(self, state: State, pools: Pools, memory: Memory, breaker: Breaker, out: list[Command]) -> None:
        self._state = state
        self._pools = pools
        self._memory = memory
        self._breaker = breaker
        self._out = out

    def release(self, running: Running, now: float, finished: events.Finished | None = None) -> None:
        """Take a running action out of every index and give its units back. `finished` is its worker's report, if there is one."""
        state, pools, waiting = self._state, self._pools, running.waiting
        running.held(now)
        del state.running[waiting.id]
        pools.quotas.release(running, now)
        state.count(running, -1)
        node = state.nodes.get(running.grant.node)
        if node is None:
            return
        node.running.pop(waiting.id, None)
        pool = pools.of(waiting.action)
        if pool is not pools.quotas:
            pool.release(running, now)
        self._memory.ended(running, finished, now)
        self._memory.give_back(node, own_memory(waiting.action), now)

    def end_waiting(self, waiting: Waiting, status: End, reason: str, cause: str, now: float, *, environment_lost_on: str = "") -> None:
        """End an action that held nothing; it must be out of its queue."""
        self._state.leave(waiting)
        self._breaker.forget(waiting)
        self._out.append(
            Finish(
                id=waiting.id,
                status=status,
                reason=reason,
                by_worker=False,
                started_at=None,
                queue_s=max(0.0, now - waiting.received_at),
                overhead_s=waiting.received_at - waiting.submitted_at,
                execution_s=0.0,
                cpu_s=0.0,
                dop=0,
                unit_s=waiting.unit_s,
                environment_lost_on=environment_lost_on,
                cause=cause,
                kind=waiting.action.kind,
            )
        )

    def stop(self, running: Running, reason: str, cause: str) -> None:
        """Have a running action stopped. It ends when its worker reports the end."""
        running.stopping, running.stop_cause = reason, cause
        self._out.append(Stop(id=running.waiting.id, node=running.grant.node, attempt=running.grant.attempt, reason=reason, cause=cause))

    def learn(self, running: Running, finished: events.Finished) -> None:
        """Have the durations learn from an action that succeeded, if its work is known."""
        if not running.work_is_known:
            return
        waiting, execution_s = running.waiting, finished.execution_s
        held_s = max(running.held_since - running.granted_at - running.background_s_at(running.held_since), 1e-9)
        mean_units = min(waiting.unit_s / held_s, waiting.units[-1]) if waiting.attempt == 1 else 0.0
        held_units = mean_units or float(running.grant.units)
        # The work of a resized action is the sum over its grants. Otherwise it is the time that the worker measured.
        resized = (running.since > running.granted_at or running.grant.background) and running.done_s > 0
        work_s = running.done_at(running.held_since) if resized else execution_s * running.speed
        cpu_s = finished.cpu_s if waiting.action.kind == MEASURED else None
        self._state.durations.observe(
            waiting.action, waiting.estimate, work_s=work_s, held_units=held_units, execution_s=execution_s, cpu_s=cpu_s
        )

    def note_end(
        self,
        running: Running,
        status: End,
        reason: str,
        cause: str,
        now: float,
        *,
        finished: events.Finished | None,
        environment_lost_on: str = "",
    ) -> None:
        """Note the end of a running action. `finished` is its worker's report.

        Without a report, the time since the start of the action counts as execution. A time that would be negative, since the clock was
        set back or the scheduler before had another one, counts as 0.
        """
        waiting = running.waiting
        self._breaker.ended(waiting, status, cause, now)
        held_s, queue_s = max(0.0, now - running.granted_at), max(0.0, running.granted_at - waiting.received_at)
        if finished is not None:
            slept_s = min(finished.slept_s, finished.waited_s)
            background_s = min(finished.waited_s - slept_s, held_s)
            execution_s = min(finished.execution_s + slept_s, held_s - background_s)
        else:
            background_s, execution_s = 0.0, max(0.0, now - running.started_at) if running.started_at is not None else 0.0
        overhead_s = max(0.0, now - waiting.submitted_at - queue_s - background_s - execution_s)
        self._out.append(
            Finish(
                id=waiting.id,
                status=status,
                reason=reason,
                by_worker=finished is not None,
                started_at=finished.started_at if finished and finished.started_at is not None else running.started_at,
                queue_s=queue_s,
                background_s=background_s,
                overhead_s=overhead_s,
                execution_s=execution_s,
                cpu_s=finished.cpu_s if finished else 0.0,
                dop=running.grant.units,
                unit_s=waiting.unit_s,
                memory_mb=finished.memory_mb if finished else None,
                resident_mb=finished.resident_mb if finished else None,
                environment_lost_on=environment_lost_on,
                cause=cause,
                kind=waiting.action.kind,
            )
        )
