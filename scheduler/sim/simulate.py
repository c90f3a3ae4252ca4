"""The virtual-time driver: replays a trace against the same `Core` that the live service drives.

Trajectories are little state machines: arrive, get an environment, think, submit a step's actions, wait for all of
them, think again. Workers are a duration model. An action runs `work_s / (E(m)·m)` seconds on the m units of its grant,
or for `timeout_s`, after a restore if the grant asks for it. Nothing else takes time, so `overhead_s` is the time of
restores. A constant may be added for the way of an action through a live system. A grant that real cells would not
allow ends the replay. The simulation keeps its own books of the cells for this check (cell_books.py).

A clock measures only the time of a decision, which does not affect the simulation.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from scheduler.core.core import Core
from scheduler.learning.durations import Observation
from scheduler.model import Grant, Limits, commands, events
from scheduler.model.lifecycle import End
from scheduler.policies import Policy
from scheduler.sim.cell_books import CellBooks
from scheduler.sim.cluster import Cluster
from scheduler.sim.memory import SimulatedMemory, says_memory
from scheduler.sim.no_collections import no_collections
from scheduler.sim.progress import Live, NodeCores
from scheduler.sim.recorded import action_of, opening_of
from scheduler.sim.summary import ActionRecord, Capacity, MemoryFigures, ReplayRecord, Stay
from scheduler.sim.trace import Step, Trace, Trajectory
from tangram.action import FIXED, Action

USAGE_S = 1.0
"""Seconds between two reports of the core-seconds of background actions."""

LEAST_TOLD_S, LEAST_TOLD_PART = 0.05, 0.2
"""The least increase that is reported: in core-seconds, and as a part of the last report."""


@dataclass(slots=True, eq=False)
class _Rollout:
    """A running trajectory: its step, and how many actions of the step still run."""

    trajectory: Trajectory
    number: int
    environment: str | None = None
    step: int = 0
    open_actions: int = 0
    carried_queue_s: float = 0.0


class Simulation:
    """One replay in virtual time. Use once: `run()`.

    `known_durations` says whether actions declare their recorded durations; the default is the policy's `Rules.profiled`. `history`
    are earlier actions to learn from. `overhead_s` passes between each grant and the start of its action, as messages take time in
    a live system.
    """

    def __init__(
        self,
        trace: Trace,
        policy: Policy,
        cluster: Cluster,
        *,
        speed: float = 1.0,
        limits: Limits | None = None,
        known_durations: bool | None = None,
        history: Sequence[Observation] = (),
        overhead_s: float = 0.0,
    ) -> None:
        self._trace = trace
        self._cluster = cluster
        self._policy = policy
        self._speed = speed
        self._overhead_s = overhead_s
        self._known_durations = policy.rules.profiled if known_durations is None else known_durations
        services, quotas = tuple(trace.services.values()), tuple(trace.quotas.values())
        self._core = Core(policy, limits=limits, services=services, quotas=quotas, history=history)
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = 0
        self._live: dict[str, Live] = {}
        self._cores: dict[str, NodeCores] = {}
        self._reporting: dict[str, None] = {}
        self._granted = 0
        self._cores_granted: list[tuple[float, float]] = []
        self._opening: dict[str, _Rollout] = {}
        self._standing: dict[str, tuple[str, float]] = {}
        self._stays: list[Stay] = []
        self._rollouts: dict[str, _Rollout] = {}
        self._records: list[ActionRecord] = []
        self._decision_us: list[float] = []
        self._cells = CellBooks(trace.services, preloaded=policy.rules.owned_cells)
        self._memory = SimulatedMemory(self._halt, self._go_on, self._ask)
        self._peak_booked_mb = 0
        self._restores = 0
        self._resizes = 0
        self._wake: float | None = None
        self._now = 0.0

    def run(self) -> ReplayRecord:
        """Replay to the last result."""
        with no_collections():
            return self._run()

    def _run(self) -> ReplayRecord:
        for spec in self._cluster.specs():
            self._cells.join(spec)
            self._memory.join(spec)
            self._cores[spec.name] = NodeCores(spec.cores, self._done, self._at)
            self._handle(events.NodeJoined(node=spec), 0.0)
        for number, trajectory in enumerate(self._trace.trajectories):
            self._at(trajectory.arrival_s, partial(self._arrive, _Rollout(trajectory, number)))
        while self._heap:
            self._now, _, happen = heapq.heappop(self._heap)
            happen(self._now)
        self._end_starved()
        first_arrival_s = min((trajectory.arrival_s for trajectory in self._trace.trajectories), default=0.0)
        return ReplayRecord(
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
            stays=self._stays,
            prediction=self._core.state.durations.error(),
            memory=MemoryFigures(
                peak_booked_mb=self._peak_booked_mb, asks=self._memory.asks, pauses=self._memory.pauses, paused_s=self._memory.paused_s
            ),
        )

    def _at(self, when: float, happen: Callable[[float], None]) -> None:
        self._order += 1
        heapq.heappush(self._heap, (when, self._order, happen))

    def _handle(self, event: events.Event, now: float) -> None:
        before, began = self._core.decisions, time.perf_counter()
        out = self._core.handle(event, now)
        if self._core.decisions != before:
            self._decision_us.append((time.perf_counter() - began) * 1e6)
        # What an environment held is free before it is granted to others, as on a node.
        for command in sorted(out, key=lambda one: not isinstance(one, commands.NoteEnvironment)):
            if isinstance(command, commands.Start):
                self._start(command, now)
            elif isinstance(command, commands.Finish):
                self._finish(command, now)
            elif isinstance(command, commands.Resize):
                self._resize(command, now)
            elif isinstance(command, commands.Allow):
                self._memory.allow(command.environment, command.allowance_mb, now)
                self._note_booked(command.node)
            elif isinstance(command, commands.Stop):
                self._at(now, partial(self._stop, command))
            elif isinstance(command, commands.Restore):
                self._restore(command, now)
            elif isinstance(command, commands.CloseEnvironment):
                self._at(now, partial(self._handle, events.EnvironmentClosed(id=command.id, reason=command.reason)))
            elif isinstance(command, commands.NoteEnvironment):
                self._note(command, now)
        # Other notes and requeues need nothing: in a simulation no node is lost.
        if (wake := self._core.next_wake(now)) is not None and (self._wake is None or wake < self._wake):
            self._wake = wake
            self._at(wake, self._tick)

    def _tick(self, now: float) -> None:
        if self._wake is None or now < self._wake:
            return  # another event came first, and the core has named a later time since
        self._wake = None
        self._handle(events.Tick(), now)

    def _note(self, command: commands.NoteEnvironment, now: float) -> None:
        """Record the time in which an environment takes room on its node."""
        if command.node is not None and command.state in ("opening", "open"):
            self._standing.setdefault(command.id, (command.node, now))
        elif command.state in ("closed", "lost") and command.id in self._standing:
            node, since = self._standing.pop(command.id)
            self._memory.close(command.id)
            self._stays.append(Stay(trajectory=int(command.id.removeprefix("e")), node=node, from_s=since, until_s=now))

    def _arrive(self, rollout: _Rollout, now: float) -> None:
        environment = f"e{rollout.number}"
        opening = opening_of(rollout.trajectory, environment)
        if opening is None:
            self._think(rollout, now)
            return
        if says_memory(rollout.trajectory):
            self._memory.open(environment, rollout.trajectory.memory_mb or 0)
        else:
            opening = replace(opening, memory=FIXED)
        rollout.environment = environment
        self._opening[f"{rollout.number}.open"] = rollout
        self._handle(events.Submitted(id=f"{rollout.number}.open", action=opening, submitted_at=now), now)

    def _think(self, rollout: _Rollout, now: float) -> None:
        """Begin the next step's thinking, or end the trajectory."""
        if rollout.step < len(rollout.trajectory.steps):
            step = rollout.trajectory.steps[rollout.step]
            self._at(now + step.think_s / self._speed, partial(self._act, rollout))
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
            action = action_of(recorded, rollout.trajectory, environment=rollout.environment, known_durations=self._known_durations)
            self._handle(events.Submitted(id=action_id, action=action, submitted_at=now), now)

    def _start(self, command: commands.Start, now: float) -> None:
        live = self._live.get(command.id)
        self._note_booked(command.grant.node)
        if live is None:
            opened = self._opening.get(command.id)
            allowance_mb = command.grant.allowance_mb
            held_mb = self._memory.opened(opened.environment or "", command.grant.node, allowance_mb) if opened is not None else None
            done = events.Finished(
                id=command.id, attempt=command.grant.attempt, status="succeeded", started_at=now, memory_mb=held_mb, resident_mb=held_mb
            )
            self._at(now, partial(self._handle, done))
            return
        if command.grant.cell_ids:
            self._cells.start(command.id, live.recorded.service or "", command.grant)
        self._restores += command.grant.restore
        restore_s = self._trace.services[live.recorded.service or ""].restore_s if command.grant.restore else 0.0
        live.begin(command.grant, now, restore_s + self._overhead_s)
        live.halted = self._overhead_s > 0
        self._enter(live, now)
        begin = partial(self._begin, live, command.grant)
        self._at(live.began_at, begin) if live.halted else begin(now)

    def _begin(self, live: Live, grant: Grant, now: float) -> None:
        """Let the program of an action start, unless the action has ended before."""
        if self._live.get(live.id) is live and live.attempt == grant.attempt:
            if live.halted:
                self._go_on(live, now)
            self._memory.begin(self._rollouts[live.id].environment or "", live, grant.allowance_mb, now)

    def _restore(self, command: commands.Restore, now: float) -> None:
        """Bring an instance onto cells. They are busy for the duration of a restore."""
        self._restores += 1
        name = self._cells.restore(command)
        there = events.ServiceChanged(node=command.node, service=command.service, cell_ids=command.cell_ids, state="resident")
        self._at(now + self._trace.services[command.service].restore_s, partial(self._restored, name, there))

    def _restored(self, name: str, there: events.ServiceChanged, now: float) -> None:
        self._cells.finish(name)
        self._handle(there, now)

    def _resize(self, command: commands.Resize, now: float) -> None:
        """Let the remaining work go on at the speed of other units. The planned end is void."""
        live = self._live[command.id]
        self._resizes += 1
        self._leave(live, now)
        live.regrant(command.core_ids, background=command.background)
        self._enter(live, now)

    def _enter(self, live: Live, now: float) -> None:
        """Let an action go on under its grant."""
        self._count_cores(len(live.core_ids), now)
        if not live.halted:
            self._run_on(live, now)

    def _run_on(self, live: Live, now: float) -> None:
        if live.core_ids or live.background:
            self._cores[live.node].enter(live, now)
        else:
            live.version += 1
            self._at(live.since + live.left_s / live.speed, partial(self._done_by_itself, live, live.version))
        if live.background and live.node not in self._reporting:
            self._reporting[live.node] = None
            self._at(now + USAGE_S, partial(self._report_usage, live.node))

    def _leave(self, live: Live, now: float) -> None:
        """Settle an action that ends or changes its grant."""
        self._count_cores(-len(live.core_ids), now)
        if not live.halted:
            self._stand_still(live, now)

    def _stand_still(self, live: Live, now: float) -> None:
        if live.core_ids or live.background:
            self._cores[live.node].leave(live, now)
        else:
            live.version += 1
            live.settle(now)

    def _halt(self, live: Live, now: float) -> None:
        """Stop an action whose environment has used up its memory."""
        self._stand_still(live, now)
        live.halted = True

    def _go_on(self, live: Live, now: float) -> None:
        live.halted, live.since = False, max(live.since, now)
        self._run_on(live, now)

    def _ask(self, now: float, wanted: events.MemoryWanted) -> None:
        self._at(now, partial(self._handle, wanted))

    def _note_booked(self, node: str) -> None:
        booked = self._core.state.nodes[node]
        self._peak_booked_mb = max(self._peak_booked_mb, booked.spec.memory_mb - max(0, booked.memory_free))

    def _report_usage(self, node: str, now: float) -> None:
        """Report, like a worker, the core-seconds of background actions."""
        cores = self._cores[node]
        if not cores.background:
            del self._reporting[node]
            return
        cores.settle_background(now)
        for live in list(cores.background.values()):
            if live.background_cpu_s - live.told_cpu_s >= max(LEAST_TOLD_S, LEAST_TOLD_PART * live.told_cpu_s):
                live.told_cpu_s = live.background_cpu_s
                self._handle(events.Used(id=live.id, attempt=live.attempt, background_cpu_s=live.background_cpu_s), now)
        self._at(now + USAGE_S, partial(self._report_usage, node))

    def _count_cores(self, cores: int, now: float) -> None:
        self._granted += cores
        if cores:
            self._cores_granted.append((now, self._granted))

    def _done_by_itself(self, live: Live, version: int, now: float) -> None:
        if live.version == version:
            self._done(live, now)

    def _stop(self, command: commands.Stop, now: float) -> None:
        live = self._live.get(command.id)
        if live is not None and live.attempt == command.attempt:
            self._done(live, now, ("cancelled", command.reason))

    def _done(self, live: Live, now: float, end: tuple[End, str] | None = None) -> None:
        self._leave(live, now)
        status, reason = end or live.end()
        self._cells.finish(live.id)
        memory_mb, resident_mb = self._memory.end(self._rollouts[live.id].environment or "", live, now)
        finished = events.Finished(
            id=live.id,
            attempt=live.attempt,
            status=status,
            reason=reason,
            memory_mb=memory_mb,
            resident_mb=resident_mb,
            started_at=live.began_at,
            execution_s=max(0.0, now - live.began_at - live.waited_s),
            cpu_s=live.cpu_s,
            waited_s=live.waited_s,
            slept_s=live.slept_s,
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
                background_s=live.waited_s - live.slept_s,
                overhead_s=live.overhead_s,
                execution_s=execution_s,
                units=live.units,
                unit_seconds=live.unit_seconds,
                floor_s=live.recorded.floor_s,
                reason=reason,
            )
        )

    def _refuse_all(self, rollout: _Rollout, reason: str, now: float) -> None:
        """Count every action that a trajectory will never submit as rejected."""
        for number in range(rollout.step, len(rollout.trajectory.steps)):
            for index, recorded in enumerate(rollout.trajectory.steps[number].actions):
                live = Live(f"{rollout.number}.{number}.{index}", recorded, now, 0.0)
                self._record(live, rollout, "rejected", reason, 0.0, 0.0, now)

    def _end_starved(self) -> None:
        """Count the actions that can never start as failed: no node could run them, and no event is left."""
        now = self._now
        for live in self._live.values():
            waited_s = now - live.submitted_at
            self._record(live, self._rollouts[live.id], "failed", "nothing can ever run it here", waited_s, 0.0, now)
        for rollout in {id(rollout): rollout for rollout in self._rollouts.values()}.values():
            self._refuse_all(rollout, "an action before it can never run here", now)
        for rollout in self._opening.values():
            self._refuse_all(rollout, "no node has room for its environment", now)
