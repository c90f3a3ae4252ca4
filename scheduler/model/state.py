"""The state that all pools share: nodes and their memory, actions, environments, jobs and their shares.

Dictionaries keep insertion order and nothing iterates over a set, so that the same events lead to the same decisions.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from scheduler.learning.durations import Durations, Observation, expected_s
from scheduler.model import Environment, Grant, Limits, NodeSpec, Running, ServiceSpec, Waiting
from scheduler.model.queue import WaitQueue, Walk, merged
from scheduler.model.rules import Rules
from scheduler.model.shares import Shares
from tangram.action import CELLS, CORES, ELASTIC, MEMORY_MB, Action

PREEMPTIBLE = "cpu.exec"
"""The kind whose actions may go to the background: commands, which a worker can hold to idle time."""

PATIENT_WINDOWS = 10
"""Windows (`Limits.window_s`) after which an action no longer comes last, however much its job holds."""


@dataclass(slots=True, eq=False)
class Node:
    """A node that is up.

    A node that is not `heard` was up before this scheduler, and has not reported the instances on its cells yet.

    Actions and environments on a `draining` node go on to their end; nothing else begins on it. Nothing at all begins on a `silent` node,
    which has missed its beats or takes up no grant. In its last `idle_beats` beats the node has taken up no grant, though grants were sent
    to it.

    A node that could not open an environment, or on which one died, *rests* until `rests_until`, for `rest_s`: no environment begins to
    open on it.
    """

    spec: NodeSpec
    memory_free: int
    last_beat: float
    environments: dict[str, None] = field(default_factory=dict)
    running: dict[str, None] = field(default_factory=dict)
    heard: bool = True
    draining: bool = False
    silent: bool = False
    idle_beats: int = 0
    rest_s: float = 0.0
    rests_until: float = 0.0
    rests_for: tuple[str, str] = ("open", "")
    """`open` and the environment that it could not open last, or `death` and the job of the last environment that died on it."""

    def offers(self, pool: str, requires: tuple[str, ...]) -> bool:
        """Say whether the node belongs to `pool` and has all the labels of `requires`."""
        return pool in self.spec.pools and all(label in self.spec.labels for label in requires)

    @property
    def takes_new(self) -> bool:
        """Whether something may begin on the node that is not bound to it."""
        return not (self.draining or self.silent)

    def takes(self, pool: str, requires: tuple[str, ...]) -> bool:
        """Say whether an action with these needs may begin on the node now.

        An action that is bound to the node may begin in any case, unless the node is silent.
        """
        return self.takes_new and self.offers(pool, requires)

    def serves(self, service: str | None) -> bool:
        """Say whether the node can bring a service onto its cells."""
        return self.spec.services is None or service in self.spec.services


class State:
    """The nouns of the system, by name."""

    def __init__(self, rules: Rules, limits: Limits, services: Sequence[ServiceSpec], history: Sequence[Observation] = ()) -> None:
        self.rules = rules
        self.limits = limits
        self.durations = Durations(learning=rules.learns, history=history)
        self.shares = Shares(limits.weights)
        self.services = {spec.name: spec for spec in services}
        self.nodes: dict[str, Node] = {}
        self.draining: dict[str, None] = {}
        """The names of the nodes that are draining. One that is lost comes back draining."""
        self.environments: dict[str, Environment] = {}
        self.waiting: dict[str, Waiting] = {}
        self.running: dict[str, Running] = {}
        self.waiting_by_job: dict[str, int] = {}
        self.deadlines: list[tuple[float, str]] = []
        self._seq = 0

    def make_waiting(self, action_id: str, action: Action, submitted_at: float, now: float) -> Waiting:
        """Return an action with its number and its place in the queue."""
        self._seq += 1
        estimate = self.durations.expect(action)
        units, durations_s = granted_amounts(action), expected_s(estimate, action.units)
        if len(durations_s) != len(units):
            durations_s = durations_s[:1] * len(units)
        service = self.services.get(action.service or "")
        if service is not None and CELLS not in action.cost.amounts:
            units, durations_s = service.cells, durations_s[:1] * len(service.cells)
        if service is not None and service.sizes is not None:
            able = [(amount, duration) for amount, duration in zip(units, durations_s, strict=True) if amount in service.sizes]
            # Where nothing is left the action is refused, with the amounts that it asked for.
            units, durations_s = (tuple(a for a, _ in able), tuple(d for _, d in able)) if able else (units, durations_s)
        waiting = Waiting(
            id=action_id,
            action=action,
            seq=self._seq,
            submitted_at=min(submitted_at, now),
            received_at=now,
            units=units,
            durations_s=durations_s,
            estimate=estimate,
            preemptible=self.rules.preempts and action.kind == PREEMPTIBLE and action.preemptible,
        )
        waiting.key = self.rules.order_key(waiting, self.limits)
        return waiting

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

    def start(self, waiting: Waiting, grant: Grant, now: float, expected_s: float) -> Running:
        """Turn a waiting action, already out of its queue, into a running one."""
        waiting.attempt = grant.attempt
        running = Running(waiting, grant, now, now + expected_s, since=now, held_since=now)
        self.count(running, 1)
        self.leave(waiting)
        self.occupy(running, self.nodes[grant.node])
        return running

    def occupy(self, running: Running, node: Node) -> None:
        """Note a running action and its memory on a node."""
        self.running[running.waiting.id] = running
        node.running[running.waiting.id] = None
        node.memory_free -= own_memory(running.waiting.action)

    def count(self, running: Running, sign: int) -> None:
        """Count a running action with its cores and cells for its job, or stop counting it."""
        job, grant = running.waiting.action.job, running.grant
        if sign > 0:
            self.shares.enter(job)
        for resource, amount in ((CORES, len(grant.core_ids)), (CELLS, len(grant.cell_ids))):
            if amount:
                self.shares.hold(job, resource, sign * amount)
        if sign < 0:
            self.shares.leave(job)

    def offer(self, spec: NodeSpec, sign: int) -> None:
        """Count the cores and cells of a node, or stop counting them."""
        self.shares.offer(CORES, sign * spec.cores)
        self.shares.offer(CELLS, sign * spec.cells)

    def in_order(self, queues: Sequence[WaitQueue], now: float) -> Iterator[Waiting]:
        """Walk queues in order. Where shares count, jobs beyond their share come last."""
        filled = [queue for queue in queues if len(queue)]
        if not filled:
            return iter(())
        if self.rules.shares and self.shares.contended:
            return Walk(filled, lambda waiting: self.deprioritised(waiting, now))
        return merged(filled)

    def deprioritised(self, waiting: Waiting, now: float) -> bool:
        """Say whether an action comes last because its job is beyond its share. This ends after `PATIENT_WINDOWS`."""
        if not self.rules.shares or now - waiting.received_at >= PATIENT_WINDOWS * self.limits.window_s:
            return False
        return self.shares.over(waiting.action.job)

    def least_busy(self, pool: str, waiting: Waiting) -> Node | None:
        """Return the node of a pool that runs the fewest actions, among the nodes that take the action and have the memory."""
        action, memory_mb = waiting.action, own_memory(waiting.action)
        nodes = [node for node in self.nodes.values() if node.takes(pool, action.requires) and node.memory_free >= memory_mb]
        return min(nodes, key=lambda node: len(node.running), default=None)

    def refusal(self, action: Action, pool: str, cores: int) -> str | None:
        """Return why no node of a pool can ever run an action on `cores` cores. Return None if a node can, or no node is up."""
        nodes = [node for node in self.nodes.values() if pool in node.spec.pools]
        if not nodes:
            return None
        able = [node for node in nodes if node.offers(pool, action.requires)]
        if not able:
            return f"no node has the labels {', '.join(action.requires)}"
        if cores > max(node.spec.cores for node in able):
            return f"needs {cores} cores, the largest node has {max(node.spec.cores for node in able)}"
        memory_mb = memory_of(action)
        if memory_mb > max(node.spec.memory_mb for node in able):
            return f"needs {memory_mb} MB, the largest node has {max(node.spec.memory_mb for node in able)} MB"
        return None


def wants_cells(action: Action) -> bool:
    """Say whether an action runs on GPU cells."""
    return CELLS in action.cost.amounts or action.kind.startswith("gpu.")


def wants_cores(action: Action) -> bool:
    """Say whether an action runs on cores."""
    return CORES in action.cost.amounts


def granted_amounts(action: Action) -> tuple[int, ...]:
    """Return the acceptable amounts of what the action is granted: cells, else cores, else one of nothing."""
    if wants_cells(action):
        return action.cost.amounts.get(CELLS, (1,))
    return action.cost.amounts.get(CORES, (1,))


def memory_of(action: Action) -> int:
    """Return the memory, in MB, that an action asks for."""
    return action.cost.least(MEMORY_MB)


def is_elastic(action: Action) -> bool:
    """Return whether an open leaves it to the scheduler when its environment gets its memory."""
    return action.memory == ELASTIC and memory_of(action) > 0


def own_memory(action: Action) -> int:
    """Return the memory, in MB, that an action holds while it runs; in an environment it is the environment's."""
    return 0 if action.environment is not None else memory_of(action)


def opened_by(waiting: Waiting, now: float) -> Environment:
    """Return the environment that a `cpu.open` action asks for."""
    action = waiting.action
    assert action.environment is not None, "checked by Action"
    return Environment(
        id=action.environment,
        job=action.job,
        trajectory=action.trajectory,
        memory_mb=memory_of(action),
        elastic=is_elastic(action),
        open_id=waiting.id,
        requires=action.requires,
        last_used=now,
        client="" if action.detached else action.client,
        owner=action.owner,
        lease_s=action.lease_s,
    )
