"""The virtual-time driver: replays a trace against the same `Core` that the live service drives.

Trajectories are little state machines: arrive, get an environment, think, submit a step's actions, wait for all of
them, think again. Workers are a duration model: an action runs `work_s / (E(m)·m)` seconds on the m units of its
grant, after a restore where the grant asks for one. Nothing else takes time here, so `overhead_s` is restoring.
What real cells would not allow ends the replay: it keeps books of them of its own (cell_books.py).

Only the time a decision takes is measured with a clock; it changes nothing that is simulated.
"""

from __future__ import annotations

import gc
import heapq
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from scheduler import commands, events
from scheduler.cell_books import CellBooks
from scheduler.core import Core
from scheduler.model import UNLIMITED, Limits, NodeSpec
from scheduler.policies.abstract import Policy
from scheduler.progress import Live, SharedCores
from scheduler.summary import ActionRecord, Capacity, RunRecord
from scheduler.trace import Step, Trace, TraceAction, Trajectory
from tangram.action import CELLS, CORES, MEMORY_MB, QUOTA_PREFIX, TOKENS_PREFIX, Action, Cost

_T = TypeVar("_T")

USAGE_S = 1.0
"""Seconds between two reports of what an action on a shared core has used."""

FILE_KINDS = ("cpu.read_file", "cpu.write_file")
"""Kinds that the worker itself carries out: they need their environment, and no core of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The simulated machines: `nodes` alike ones, with cores, memory in MB and GPUs each."""

    nodes: int = 1
    cores: int = 1
    memory_mb: int = UNLIMITED
    gpus: int = 0
    gpu_memory_mb: int = 80_000
    labels: tuple[str, ...] = ()

    def specs(self) -> list[NodeSpec]:
        """Return the nodes by name, in order."""
        return [
            NodeSpec(
                name=f"n{number}",
                pools=("cpu", "gpu", "api") if self.gpus else ("cpu", "api"),
                cores=self.cores,
                memory_mb=self.memory_mb,
                cells=self.gpus,
                cell_memory_mb=self.gpu_memory_mb,
                labels=frozenset(self.labels),
            )
            for number in range(self.nodes)
        ]


def action_of(
    recorded: TraceAction, trajectory: Trajectory, *, environment: str | None, session: str | None = None, told: bool = True
) -> Action:
    """Return the action that a recorded one submits again. Environment and session matter to `cpu.*` only.

    Unless the scheduler is to be `told`, the recorded duration is not declared: nobody knows it before it has run.
    """
    on_cpu = recorded.kind.startswith("cpu.")
    amounts: dict[str, tuple[int, ...]]
    if recorded.kind in FILE_KINDS:
        amounts = {}
    elif on_cpu:
        amounts = {CORES: recorded.elasticity.units}
    elif recorded.kind.startswith("gpu."):
        amounts = {CELLS: recorded.elasticity.units}
    else:
        amounts = {f"{QUOTA_PREFIX}{recorded.quota}": (1,)}
        if recorded.tokens:
            amounts[f"{TOKENS_PREFIX}{recorded.quota}"] = (recorded.tokens,)
    return Action(
        kind=recorded.kind,
        cost=Cost(amounts),
        curve=recorded.elasticity.curve,
        job=trajectory.job,
        trajectory=trajectory.trajectory,
        environment=environment if on_cpu else None,
        session=session if on_cpu else None,
        service=recorded.service,
        requires=recorded.requires if not on_cpu else (),
        work_s=recorded.work_s if told else None,
        timeout_s=recorded.timeout_s,
        priority=recorded.priority if recorded.priority is not None else trajectory.priority,
        idempotent=recorded.idempotent if recorded.idempotent is not None else not on_cpu,
        action_class=recorded.action_class,
    )


def opening_of(trajectory: Trajectory, environment: str) -> Action | None:
    """Return the `cpu.open` that a trajectory begins with; None where it never needs a sandbox.

    The environment must stand where all of its actions can run: it asks for their labels, and for as many cores as
    the most demanding of them needs at least.
    """
    on_cpu = [recorded for recorded in trajectory.actions() if recorded.kind.startswith("cpu.")]
    if not on_cpu:
        return None
    labels = dict.fromkeys(label for recorded in on_cpu for label in recorded.requires)
    amounts: dict[str, tuple[int, ...]] = {CORES: (max(recorded.elasticity.units[0] for recorded in on_cpu),)}
    if trajectory.memory_mb:
        amounts[MEMORY_MB] = (trajectory.memory_mb,)
    return Action(
        kind="cpu.open",
        cost=Cost(amounts),
        job=trajectory.job,
        trajectory=trajectory.trajectory,
        environment=environment,
        requires=tuple(labels),
        priority=trajectory.priority,
        work_s=0.0,
    )


@dataclass(slots=True, eq=False)
class _Rollout:
    """A trajectory on its way: which step it is at and how many of that step's actions still run."""

    trajectory: Trajectory
    number: int
    environment: str | None = None
    step: int = 0
    open_actions: int = 0
    carried_queue_s: float = 0.0


@contextmanager
def _no_collections() -> Iterator[None]:
    """Keep the cyclic garbage collector out of what is timed: nothing here is cyclic, and it would walk all that lives."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Simulation:
    """One replay in virtual time. Use once: `run()`.

    `told` says whether the scheduler is told the recorded durations of what comes in; by default as the policy is
    (`Policy.told`).
    """

    def __init__(
        self,
        trace: Trace,
        policy: Policy,
        cluster: Cluster,
        *,
        speed: float = 1.0,
        limits: Limits | None = None,
        told: bool | None = None,
    ) -> None:
        self._trace = trace
        self._cluster = cluster
        self._policy = policy
        self._speed = speed
        self._told = policy.told if told is None else told
        self._core = Core(policy, limits=limits, services=tuple(trace.services.values()), quotas=tuple(trace.quotas.values()))
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = 0
        self._live: dict[str, Live] = {}
        self._cores = SharedCores(self._plan_end)
        self._granted = 0.0
        self._cores_granted: list[tuple[float, float]] = []
        self._opening: dict[str, _Rollout] = {}
        self._rollouts: dict[str, _Rollout] = {}
        self._records: list[ActionRecord] = []
        self._decision_us: list[float] = []
        self._cells = CellBooks(trace.services, preloaded=bool(policy.pod_cores()))
        self._restores = 0
        self._resizes = 0
        self._wake: float | None = None
        self._now = 0.0

    def run(self) -> RunRecord:
        """Replay to the last result."""
        with _no_collections():
            return self._run()

    def _run(self) -> RunRecord:
        for spec in self._cluster.specs():
            self._cells.join(spec)
            self._handle(events.NodeJoined(node=spec), 0.0)
        for number, trajectory in enumerate(self._trace.trajectories):
            self._at(trajectory.arrival_s, _bind(self._arrive, _Rollout(trajectory, number)))
        while self._heap:
            self._now, _, happen = heapq.heappop(self._heap)
            happen(self._now)
        self._end_starved()
        first_arrival_s = min((trajectory.arrival_s for trajectory in self._trace.trajectories), default=0.0)
        return RunRecord(
            policy=self._policy.name,
            trajectories=len(self._trace.trajectories),
            actions=self._records,
            first_arrival_s=first_arrival_s,
            last_result_s=max((record.ended_at for record in self._records), default=first_arrival_s),
            capacity=Capacity(cores=self._cluster.nodes * self._cluster.cores, cells=self._cluster.nodes * self._cluster.gpus),
            resizes=self._resizes,
            restores=self._restores,
            decisions=self._core.decisions,
            decision_us=self._decision_us,
            cores_granted=self._cores_granted,
            prediction=self._core.state.durations.error(),
        )

    def _at(self, when: float, happen: Callable[[float], None]) -> None:
        self._order += 1
        heapq.heappush(self._heap, (when, self._order, happen))

    def _handle(self, event: events.Event, now: float) -> None:
        before, began = self._core.decisions, time.perf_counter()
        out = self._core.handle(event, now)
        if self._core.decisions != before:
            self._decision_us.append((time.perf_counter() - began) * 1e6)
        for command in out:
            if isinstance(command, commands.Start):
                self._start(command, now)
            elif isinstance(command, commands.Finish):
                self._finish(command, now)
            elif isinstance(command, commands.Resize):
                self._resize(command, now)
            elif isinstance(command, commands.Restore):
                self._restore(command, now)
            elif isinstance(command, commands.CloseEnvironment):
                self._at(now, _bind(self._handle, events.EnvironmentClosed(id=command.id, reason=command.reason)))
        wake = self._core.next_wake(now)
        if wake is not None and (self._wake is None or wake < self._wake):
            self._wake = wake
            self._at(wake, self._tick)

    def _tick(self, now: float) -> None:
        self._wake = None
        self._handle(events.Tick(), now)

    def _arrive(self, rollout: _Rollout, now: float) -> None:
        environment = f"e{rollout.number}"
        opening = opening_of(rollout.trajectory, environment)
        if opening is None:
            self._think(rollout, now)
            return
        rollout.environment = environment
        self._opening[f"{rollout.number}.open"] = rollout
        self._handle(events.Submitted(id=f"{rollout.number}.open", action=opening, submitted_at=now), now)

    def _think(self, rollout: _Rollout, now: float) -> None:
        """Begin the next step's thinking, or end the trajectory."""
        if rollout.step < len(rollout.trajectory.steps):
            step = rollout.trajectory.steps[rollout.step]
            self._at(now + step.think_s / self._speed, _bind(self._act, rollout))
        elif rollout.environment is not None:
            closing = Action(kind="cpu.close", environment=rollout.environment, job=rollout.trajectory.job)
            self._handle(events.Submitted(id=f"{rollout.number}.close", action=closing, submitted_at=now), now)

    def _act(self, rollout: _Rollout, now: float) -> None:
        step: Step = rollout.trajectory.steps[rollout.step]
        number = rollout.step
        rollout.step += 1
        rollout.open_actions = len(step.actions)
        for index, recorded in enumerate(step.actions):
            action_id = f"{rollout.number}.{number}.{index}"
            carried, rollout.carried_queue_s = rollout.carried_queue_s, 0.0
            self._live[action_id] = Live(action_id, recorded, now, carried)
            self._rollouts[action_id] = rollout
            action = action_of(recorded, rollout.trajectory, environment=rollout.environment, told=self._told)
            self._handle(events.Submitted(id=action_id, action=action, submitted_at=now), now)

    def _start(self, command: commands.Start, now: float) -> None:
        live = self._live.get(command.id)
        if live is None:
            done = events.Finished(id=command.id, attempt=command.grant.attempt, status="succeeded", started_at=now)
            self._at(now, _bind(self._handle, done))
            return
        if command.grant.cell_ids:
            self._cells.start(command.id, live.recorded.service or "", command.grant)
        restore_s = 0.0
        if command.grant.restore:
            self._restores += 1
            restore_s = self._trace.services[live.recorded.service or ""].restore_s
        live.begin(command.grant, now, restore_s)
        self._count_cores(live.cores_held, now)
        self._cores.enter(live, now)
        if command.grant.share < 1.0:
            self._at(now + USAGE_S, _bind(self._report_usage, live))

    def _restore(self, command: commands.Restore, now: float) -> None:
        """Bring an instance onto cells, which are busy with it for as long as a restore takes."""
        self._restores += 1
        name = self._cells.restore(command)
        there = events.ServiceChanged(node=command.node, service=command.service, cell_ids=command.cell_ids, state="resident")
        self._at(now + self._trace.services[command.service].restore_s, _bind(self._restored, (name, there)))

    def _restored(self, restored: tuple[str, events.ServiceChanged], now: float) -> None:
        name, there = restored
        self._cells.finish(name)
        self._handle(there, now)

    def _resize(self, command: commands.Resize, now: float) -> None:
        """Let the rest of the work go on at the pace of other units; the end that was planned is void."""
        live = self._live[command.id]
        self._resizes += 1
        self._count_cores(-live.cores_held, now)
        self._cores.leave(live, now)
        shared_before = live.share < 1.0
        live.regrant(len(command.core_ids), command.core_ids, command.share)
        self._count_cores(live.cores_held, now)
        self._cores.enter(live, now)
        if live.share < 1.0 and not shared_before:
            self._at(now + USAGE_S, _bind(self._report_usage, live))

    def _plan_end(self, live: Live) -> None:
        self._at(live.end_at(), _bind(self._done, (live, live.turn)))

    def _report_usage(self, live: Live, now: float) -> None:
        """Report, like a worker, what an action on a shared core has used so far."""
        if live.id not in self._live or live.share >= 1.0:
            return
        self._handle(events.Used(id=live.id, attempt=live.attempt, cpu_s=live.cpu_s_at(now), at=now), now)
        self._at(now + USAGE_S, _bind(self._report_usage, live))

    def _count_cores(self, cores: float, now: float) -> None:
        self._granted += cores
        if cores:
            self._cores_granted.append((now, self._granted))

    def _done(self, planned: tuple[Live, int], now: float) -> None:
        live, turn = planned
        if turn != live.turn:
            return
        self._cores.leave(live, now)
        self._cells.finish(live.id)
        live.turn += 1
        self._count_cores(-live.cores_held, now)
        finished = events.Finished(
            id=live.id,
            attempt=live.attempt,
            status="succeeded",
            started_at=live.began_at,
            execution_s=now - live.began_at,
            cpu_s=live.cpu_s_at(now),
        )
        self._handle(finished, now)

    def _finish(self, command: commands.Finish, now: float) -> None:
        rollout = self._opening.pop(command.id, None)
        if rollout is not None:
            if command.status != "succeeded":
                rollout.environment = None
                self._refuse_all(rollout, command.reason, now)
                return
            rollout.carried_queue_s = now - rollout.trajectory.arrival_s
            self._think(rollout, now)
            return
        live = self._live.pop(command.id, None)
        if live is None:
            return
        rollout = self._rollouts.pop(command.id)
        self._record(live, rollout, command.status, command.reason, command.queue_s, command.execution_s, now)
        rollout.open_actions -= 1
        if rollout.open_actions == 0:
            self._think(rollout, now)

    def _record(self, live: Live, rollout: _Rollout, status: str, reason: str, queue_s: float, execution_s: float, now: float) -> None:
        self._records.append(
            ActionRecord(
                id=live.id,
                job=rollout.trajectory.job,
                trajectory=rollout.trajectory.trajectory,
                kind=live.recorded.kind,
                status=status,
                submitted_at=live.submitted_at - live.carried_queue_s,
                ended_at=now,
                queue_s=queue_s + live.carried_queue_s,
                overhead_s=live.restore_s,
                execution_s=execution_s,
                units=live.units,
                unit_seconds=live.unit_seconds,
                floor_s=live.recorded.floor_s,
                reason=reason,
            )
        )

    def _refuse_all(self, rollout: _Rollout, reason: str, now: float) -> None:
        """Count every action that a trajectory has not submitted, and never will, as rejected."""
        for number in range(rollout.step, len(rollout.trajectory.steps)):
            for index, recorded in enumerate(rollout.trajectory.steps[number].actions):
                live = Live(f"{rollout.number}.{number}.{index}", recorded, now, 0.0)
                self._record(live, rollout, "rejected", reason, 0.0, 0.0, now)

    def _end_starved(self) -> None:
        """Count what nothing will ever start as failed: no node could run it and nothing is left to happen."""
        now = self._now
        for live in self._live.values():
            waited_s = now - live.submitted_at
            self._record(live, self._rollouts[live.id], "failed", "nothing can ever run it here", waited_s, 0.0, now)
        for rollout in {id(rollout): rollout for rollout in self._rollouts.values()}.values():
            self._refuse_all(rollout, "an action before it can never run here", now)
        for rollout in self._opening.values():
            self._refuse_all(rollout, "no node has room for its environment", now)


def _bind(call: Callable[[_T, float], None], value: _T) -> Callable[[float], None]:
    return lambda now: call(value, now)
