"""All that the core knows at one moment, and how units are taken and given back.

Only the modules of the core change it. Dictionaries keep insertion order and nothing iterates over a set, so that
the same events lead to the same decisions.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from scheduler.core.gone import GoneEnvironments
from scheduler.core.open_queue import OpenQueue
from scheduler.cpu.cores import CoreGroup
from scheduler.gpu.cells import CellGroup
from scheduler.learning.durations import Durations, Observation, expected_s
from scheduler.learning.work_left import WorkLeft, next_bin_s
from scheduler.model import Environment, Grant, Limits, NodeSpec, QuotaSpec, Running, ServiceSpec, Waiting
from scheduler.model.commands import Command, Finish, NoteEnvironment, Start
from scheduler.model.lifecycle import End
from scheduler.model.queue import Contenders, WaitQueue, Walk, merged
from scheduler.model.shares import Shares
from scheduler.policies.abstract import Policy
from scheduler.policies.allocation import steps_of
from scheduler.quotas.account import QuotaState, by_quota
from tangram.action import CELLS, CORES, MEMORY_MB, QUOTA_PREFIX, Action

PREEMPTIBLE = "cpu.exec"
"""The kind whose actions may go to the background: commands, which a worker can hold to idle time."""

STARTS = "starts"
"""Start slots as a resource: the environments that may be opening at once."""

LEAST_MEMORY_MB = 1
"""Memory, in MB, that an environment counts for in the shares where it declares none: many of those are more than few, too."""

PATIENT_WINDOWS = 10
"""Windows (`Limits.window_s`) after which an action comes last no longer, however much its job holds."""


@dataclass(slots=True, eq=False)
class Node:
    """A node that is up. One that is not `heard` was up before this scheduler, and what there is on its cells is still to be said."""

    spec: NodeSpec
    cores: CoreGroup
    cells: CellGroup
    memory_free: int
    last_beat: float
    environments: dict[str, None] = field(default_factory=dict)
    running: dict[str, None] = field(default_factory=dict)
    heard: bool = True

    def offers(self, pool: str, requires: tuple[str, ...]) -> bool:
        """Say whether the node belongs to `pool` and has all the labels."""
        return pool in self.spec.pools and all(label in self.spec.labels for label in requires)

    def serves(self, service: str | None) -> bool:
        """Say whether the node can bring a service onto its cells."""
        return self.spec.services is None or service in self.spec.services


class State:
    """The nouns of the system, by name."""

    def __init__(
        self,
        policy: Policy,
        limits: Limits,
        services: tuple[ServiceSpec, ...],
        quotas: tuple[QuotaSpec, ...],
        history: Sequence[Observation] = (),
    ) -> None:
        self.policy = policy
        self.limits = limits
        self.durations = Durations(learning=policy.learns, history=history)
        self.work_left = WorkLeft(history if policy.ranks and policy.learns else ())
        self.shares = Shares(limits.weights)
        self.places = Shares(limits.weights)
        """What jobs hold of the memory of nodes, and of start slots, by their environments; a job is active while it has any."""
        self.places.offer(STARTS, limits.starting_limit)
        self.services = {spec.name: spec for spec in services}
        self.quotas = by_quota(quotas)
        self.usage_headers = {spec.name: spec.usage_header for spec in quotas if spec.usage_header is not None}
        self.hosts = {spec.name: spec.hosts for spec in quotas if spec.hosts}
        self.nodes: dict[str, Node] = {}
        self.pods: dict[str, CoreGroup] = {}
        self.environments: dict[str, Environment] = {}
        self.gone = GoneEnvironments()
        self.waiting: dict[str, Waiting] = {}
        self.running: dict[str, Running] = {}
        self.floating_cores = Contenders()
        self.floating_cells = WaitQueue()
        self.opens = OpenQueue(policy.pod_cores())
        self.unplaced = WaitQueue()
        self.waiting_by_job: dict[str, int] = {}
        self.deadlines: list[tuple[float, str]] = []
        self.out: list[Command] = []
        self.room_returned = False
        self.dirty: dict[CoreGroup | CellGroup | QuotaState, None] = {}
        self._seq = self._seq_of_looks = 0
        self._looks: list[tuple[float, int, CoreGroup]] = []
        for account in dict.fromkeys(self.quotas.values()):
            self.shares.offer(f"{QUOTA_PREFIX}{account.account}", account.spec.concurrency or 0)

    def make_waiting(self, action_id: str, action: Action, submitted_at: float, now: float) -> Waiting:
        """Return an action with its number and its place in the queue."""
        self._seq += 1
        estimate = self.durations.expect(action)
        units, durations_s = lane_amounts(action), expected_s(estimate, action.units)
        if len(durations_s) != len(units):
            durations_s = durations_s[:1] * len(units)
        service = self.services.get(action.service or "")
        if service is not None and CELLS not in action.cost.amounts:
            units, durations_s = service.cells, durations_s[:1] * len(service.cells)
        if service is not None and service.sizes is not None:
            able = [(amount, duration) for amount, duration in zip(units, durations_s, strict=True) if amount in service.sizes]
            # Where nothing is left the action is refused (refusal.py), with the amounts that it asked for.
            units, durations_s = (tuple(a for a, _ in able), tuple(d for _, d in able)) if able else (units, durations_s)
        waiting = Waiting(
            id=action_id,
            action=action,
            seq=self._seq,
            submitted_at=min(submitted_at, now),
            received_at=now,
            units=units,
            durations_s=durations_s,
            steps=steps_of(units, durations_s),
            estimate=estimate,
            preemptible=self.policy.preempts and action.kind == PREEMPTIBLE and action.preemptible,
        )
        waiting.key = self.policy.order_key(waiting, self.limits)
        return waiting

    def contend(self, waiting: Waiting, queue: Contenders, since: float) -> None:
        """Have an action want cores, which counts as if it had since then."""
        self._rank(waiting)
        queue.enter(waiting, since)

    def rank_again(self, waiting: Waiting, queue: Contenders) -> None:
        """Put an action where it belongs in its queue, now that more is known."""
        queue.remove(waiting)
        self._rank(waiting)
        queue.add(waiting)

    def _rank(self, waiting: Waiting) -> None:
        if self.policy.ranks:
            waiting.key = (-waiting.action.priority, self.left_s(waiting), waiting.seq)

    def left_s(self, waiting: Waiting) -> float:
        """Return the work that is expected to be left of an action and of its trajectory, in seconds on one core."""
        action, environment = waiting.action, self.environments.get(waiting.action.environment or "")
        trajectory = environment.life if environment is not None else None
        return self.work_left.expected_s(action.job, waiting.life, trajectory)

    def note_work(self, running: Running, now: float) -> None:
        """Take in what an action on cores has had so far."""
        if not self.policy.learns:
            return
        action, work_s = running.waiting.action, running.done_at(now)
        environment = self.environments.get(action.environment or "")
        if environment is None:
            self.work_left.note(action.job, running.waiting.life, work_s, None, 0.0)
            return
        before_s = environment.ended_work_s
        self.work_left.note(action.job, running.waiting.life, work_s, environment.life, before_s + work_s)

    def changes_in_s(self, running: Running) -> float:
        """Return the seconds until what is expected of a running action changes, as far as it gets cores until then."""
        environment = self.environments.get(running.waiting.action.environment or "")
        work_s = next_bin_s(running.waiting.life)
        if environment is not None:
            work_s = min(work_s, next_bin_s(environment.life))
        return work_s / running.speed if running.speed and self.policy.learns else math.inf

    def end_work(self, running: Running, now: float, *, counts: bool) -> None:
        """Take in that an action on cores has ended; one that was cut short does not count as an end."""
        if not (self.policy.ranks and wants_cores(running.waiting.action) and running.waiting.action.kind != "cpu.open"):
            return
        action = running.waiting.action
        self.note_work(running, now)
        if counts and self.policy.learns:
            self.work_left.action_ended(action.job, running.waiting.life)
        environment = self.environments.get(action.environment or "")
        if environment is not None:
            environment.ended_work_s += running.done_at(now)

    def look_at(self, group: CoreGroup, at: float) -> None:
        """Have a group looked at when that time has come."""
        if at < group.look_at:
            group.look_at = at
            self._seq_of_looks += 1
            heapq.heappush(self._looks, (at, self._seq_of_looks, group))

    def next_look(self) -> float | None:
        """Return when a group is to be looked at though nothing has happened."""
        while self._looks and self._looks[0][2].look_at != self._looks[0][0]:
            heapq.heappop(self._looks)
        return self._looks[0][0] if self._looks else None

    def take_looks(self, now: float) -> None:
        """Touch the groups whose time has come."""
        while (at := self.next_look()) is not None and at <= now:
            group = heapq.heappop(self._looks)[2]
            group.look_at = math.inf
            self.touch(group)

    def enter(self, waiting: Waiting) -> None:
        """Count an action as waiting; its queue deadline holds each time it waits."""
        self.waiting[waiting.id] = waiting
        if waiting.action.queue_timeout_s is not None:
            heapq.heappush(self.deadlines, (waiting.submitted_at + waiting.action.queue_timeout_s, waiting.id))
        job = waiting.action.job
        self.waiting_by_job[job] = self.waiting_by_job.get(job, 0) + 1
        self.shares.enter(job)

    def leave(self, waiting: Waiting) -> None:
        """Count an action as waiting no longer."""
        del self.waiting[waiting.id]
        job = waiting.action.job
        left = self.waiting_by_job[job] - 1
        if left:
            self.waiting_by_job[job] = left
        else:
            del self.waiting_by_job[job]
        self.shares.leave(job)

    def count(self, running: Running, sign: int) -> None:
        """Count a running action, and what it holds, for its job; or count it no longer."""
        action, grant = running.waiting.action, running.grant
        if sign > 0:
            self.shares.enter(action.job)
        for resource, amount in ((CORES, len(grant.core_ids)), (CELLS, len(grant.cell_ids))):
            if amount:
                self.shares.hold(action.job, resource, sign * amount)
        for account, requests, _ in self.draws(action):
            self.shares.hold(action.job, f"{QUOTA_PREFIX}{account.account}", sign * requests)
        if sign < 0:
            self.shares.leave(action.job)

    def draws(self, action: Action) -> list[tuple[QuotaState, int, int]]:
        """Return the accounts that an action draws on, each once, with its requests and tokens there."""
        names = action.cost.quotas
        if not names:
            return []
        drawn: dict[QuotaState, tuple[int, int]] = {}
        for name in names:
            account = self.quotas[name]
            requests, tokens = drawn.get(account, (0, 0))
            drawn[account] = (requests + action.cost.least(QUOTA_PREFIX + name), tokens + action.cost.tokens(name))
        return [(account, requests, tokens) for account, (requests, tokens) in drawn.items()]

    def offer(self, spec: NodeSpec, sign: int) -> None:
        """Count what a node offers, or offers no longer."""
        self.shares.offer(CORES, sign * spec.cores)
        self.shares.offer(CELLS, sign * spec.cells)
        if "cpu" in spec.pools:
            self.places.offer(MEMORY_MB, sign * spec.memory_mb)

    def in_order(self, queues: Sequence[WaitQueue], now: float) -> Iterator[Waiting]:
        """Walk queues in order; where shares count, jobs beyond theirs come last."""
        filled = [queue for queue in queues if len(queue)]
        if not filled:
            return iter(())
        if self.policy.shares and self.shares.contended:
            return Walk(filled, lambda waiting: self.comes_last(waiting, now))
        return merged(filled)

    def comes_last(self, waiting: Waiting, now: float) -> bool:
        """Say whether an action comes after others because its job holds more than its share; not for ever."""
        if not self.policy.shares or now - waiting.received_at >= PATIENT_WINDOWS * self.limits.window_s:
            return False
        return self.shares.over(waiting.action.job)

    def start(self, waiting: Waiting, grant: Grant, now: float, expected_s: float) -> Running:
        """Turn a waiting action, already out of its queue, into a running one."""
        waiting.attempt = grant.attempt
        running = Running(waiting, grant, now, now + expected_s, since=now, held_since=now)
        self.count(running, 1)
        self.leave(waiting)
        self.running[waiting.id] = running
        node = self.nodes[grant.node]
        node.running[waiting.id] = None
        node.memory_free -= own_memory(waiting.action)
        self.out.append(Start(id=waiting.id, grant=grant))
        return running

    def finish_waiting(self, waiting: Waiting, status: End, reason: str, now: float, *, environment_lost_on: str = "") -> None:
        """End an action that held nothing; it must be out of its queue."""
        self.leave(waiting)
        queue_s = max(0.0, now - waiting.received_at)
        overhead_s = waiting.received_at - waiting.submitted_at
        self.out.append(
            Finish(
                id=waiting.id,
                status=status,
                reason=reason,
                by_worker=False,
                started_at=None,
                queue_s=queue_s,
                overhead_s=overhead_s,
                execution_s=0.0,
                cpu_s=0.0,
                dop=0,
                unit_s=waiting.unit_s,
                environment_lost_on=environment_lost_on,
            )
        )

    def keep_environment(self, environment: Environment) -> None:
        """Take in an environment."""
        self.environments[environment.id] = environment
        self.places.enter(environment.job)

    def forget_environment(self, environment: Environment) -> None:
        """Forget an environment that is gone."""
        known = self.environments.pop(environment.id, None) is not None
        if known:
            self.places.leave(environment.job)
        if known and self.policy.ranks and self.policy.learns and not environment.cut_short:
            self.work_left.trajectory_ended(environment.job, environment.life)

    def count_place(self, environment: Environment, sign: int) -> None:
        """Count what an environment that has a node holds of its memory, or holds no longer."""
        self.places.hold(environment.job, MEMORY_MB, sign * max(environment.memory_mb, LEAST_MEMORY_MB))

    def note(self, environment: Environment, reason: str = "") -> None:
        """Ask for an environment's state to be written down."""
        environment.use_noted = environment.last_used
        self.out.append(
            NoteEnvironment(
                id=environment.id,
                state=environment.state,
                node=environment.node,
                job=environment.job,
                trajectory=environment.trajectory,
                memory_mb=environment.memory_mb,
                pod_core_ids=environment.pod_core_ids,
                reason=reason,
                client=environment.client,
                used_at=environment.last_used,
            )
        )

    def core_group(self, environment: Environment) -> CoreGroup:
        """Return the cores that the actions of a placed environment run on."""
        pod = self.pods.get(environment.id)
        if pod is not None:
            return pod
        assert environment.node is not None, "only a placed environment has cores"
        return self.nodes[environment.node].cores

    def give_memory(self, node: Node, memory_mb: int) -> None:
        """Take memory back, and look again at all that may have waited for it."""
        if not memory_mb:
            return
        node.memory_free += memory_mb
        self.room_returned = True
        self.touch(node.cores)
        self.touch(node.cells)
        for quota in self.quotas.values():
            if len(quota.queue):
                self.touch(quota)

    def touch(self, group: CoreGroup | CellGroup | QuotaState) -> None:
        """Have the group looked at before the current event is done."""
        self.dirty[group] = None


def wants_cells(action: Action) -> bool:
    """Say whether an action runs on GPU cells."""
    return CELLS in action.cost.amounts or action.kind.startswith("gpu.")


def wants_cores(action: Action) -> bool:
    """Say whether an action runs on cores."""
    return CORES in action.cost.amounts


def lane_amounts(action: Action) -> tuple[int, ...]:
    """Return the acceptable amounts of what the action is granted: cells, else cores, else one of nothing."""
    if wants_cells(action):
        return action.cost.amounts.get(CELLS, (1,))
    return action.cost.amounts.get(CORES, (1,))


def memory_of(action: Action) -> int:
    """Return the memory, in MB, that an action asks for."""
    return action.cost.least(MEMORY_MB)


def own_memory(action: Action) -> int:
    """Return the memory, in MB, that an action holds while it runs; in an environment it is the environment's."""
    return 0 if action.environment is not None else memory_of(action)
