"""The core under any events in any order: what must hold after each of them, whatever the policy.

`Ledger` keeps its own books from the commands alone, as workers would, and compares them with the core's.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler import commands, events
from scheduler.core import Core
from scheduler.model import Limits, NodeSpec, QuotaSpec, ServiceSpec
from scheduler.policies import make_policy
from tangram.action import CELLS, CORES, MEMORY_MB, Action, Cost
from tangram.elasticity import FLAT, Amdahl

SERVICES = (
    ServiceSpec(name="shared", memory_mb=10, restore_s=0.5, max_concurrency=2),
    ServiceSpec(name="single", cells=(1, 2), memory_mb=10, restore_s=0.5, instances_per_node=1),
    ServiceSpec(name="large", cells=(2,), memory_mb=100),
    ServiceSpec(name="sized", cells=(1, 2), sizes=(2,)),
)
QUOTAS = (
    QuotaSpec(name="even", rate_per_s=2.0, concurrency=2),
    QuotaSpec(name="burst", rate_per_s=1.0, burst=3),
    QuotaSpec(name="narrow", concurrency=1),
)
POLICIES = ("elastic", "paper", "fcfs", "fixed:2", "static:2")
JOBS = ("j1", "j2")
TRAJECTORIES = ("t1", "t2")
ENVIRONMENTS = ("e1", "e2", "e3")
NODES = ("n0", "n1", "n2")
TOLERANCE = 1e-6


@dataclass
class Book:
    """What the ledger knows of one action."""

    action: Action
    state: str = "waiting"
    grant: Any = None
    attempt: int = 0
    ends: int = 0
    stopped: bool = False


@dataclass
class Ledger:
    """Books kept from commands, with the checks that need no look inside the core."""

    limits: Limits
    shares: bool
    """Whether services own their cells from the start, so that nothing is ever restored."""
    actions: dict[str, Book] = field(default_factory=dict)
    nodes: dict[str, NodeSpec] = field(default_factory=dict)
    environments: dict[str, commands.NoteEnvironment] = field(default_factory=dict)
    resident: dict[str, dict[tuple[int, ...], str]] = field(default_factory=dict)
    closing: list[str] = field(default_factory=list)
    tokens: dict[str, tuple[float, float]] = field(default_factory=dict)
    last_opening: float = float("-inf")

    def take(self, command: commands.Command, now: float) -> None:
        match command:
            case commands.Start():
                self._start(command, now)
            case commands.Resize():
                book = self._granted(command.id, command.attempt)
                assert len(set(command.core_ids)) == len(command.core_ids)
                assert len(command.core_ids) in book.action.cost.amounts[CORES]
                book.grant = commands.Grant(
                    node=command.node, attempt=command.attempt, units=len(command.core_ids), core_ids=command.core_ids
                )
            case commands.Stop():
                self._granted(command.id, command.attempt).stopped = True
            case commands.Requeue():
                book = self.actions[command.id]
                assert book.state == "running"
                assert book.grant.node not in self.nodes
                book.state, book.grant = "waiting", None
            case commands.Finish():
                book = self.actions[command.id]
                assert book.state in ("waiting", "running"), f"{command.id} ends twice"
                assert min(command.queue_s, command.overhead_s, command.execution_s) >= 0
                book.state, book.grant, book.ends = command.status, None, book.ends + 1
            case commands.CloseEnvironment():
                assert self.environments[command.id].node == command.node
                self.closing.append(command.id)
            case commands.NoteEnvironment():
                self.environments[command.id] = command
                if command.state in ("closed", "lost"):
                    del self.environments[command.id]
                    self.closing = [e for e in self.closing if e != command.id]
            case commands.NoteNode():
                if command.state != "up":
                    del self.nodes[command.name]

    def _granted(self, action_id: str, attempt: int) -> Book:
        book = self.actions[action_id]
        assert book.state == "running"
        assert book.grant.attempt == attempt
        return book

    def _start(self, command: commands.Start, now: float) -> None:
        book, grant = self.actions[command.id], command.grant
        assert book.state == "waiting", f"{command.id} starts while {book.state}"
        assert grant.attempt == book.attempt + 1
        assert grant.node in self.nodes
        book.state, book.grant, book.attempt = "running", grant, grant.attempt
        if book.action.kind == "cpu.open":
            if self.limits.starts_per_s:
                assert now >= self.last_opening + 1 / self.limits.starts_per_s - TOLERANCE
            self.last_opening = now
        elif CORES in book.action.cost.amounts:
            assert grant.units in book.action.cost.amounts[CORES]
            assert len(set(grant.core_ids)) == len(grant.core_ids) == grant.units
        if book.action.environment is None:
            assert set(book.action.requires) <= self.nodes[grant.node].labels
        if grant.cell_ids:
            self._start_on_cells(book, grant)
        for quota in QUOTAS:
            self._take_tokens(quota, book.action.cost.least(f"quota:{quota.name}"), now)

    def _start_on_cells(self, book: Book, grant: Any) -> None:
        assert len(set(grant.cell_ids)) == len(grant.cell_ids) == grant.units
        assert grant.units in book.action.cost.amounts.get(CELLS, (1, 2))
        service = next(s for s in SERVICES if s.name == book.action.service)
        assert service.memory_mb <= self.nodes[grant.node].cell_memory_mb
        resident = self.resident[grant.node]
        busy = {b.grant.cell_ids for b in self.running().values() if b is not book and b.grant.node == grant.node}
        for name in grant.evict:
            idle = [cells for cells, service_there in resident.items() if service_there == name and cells not in busy]
            del resident[max(idle, key=lambda cells: len(set(cells) & set(grant.cell_ids)))]
        if resident.get(grant.cell_ids) != service.name:
            assert grant.restore or self.shares, "it runs where its service is not resident"
            assert not any(set(cells) & set(grant.cell_ids) for cells in resident), f"{service.name} is restored onto cells in use"
        resident[grant.cell_ids] = service.name
        held = sum(name == service.name for name in resident.values())
        assert self.shares or service.instances_per_node is None or held <= service.instances_per_node

    def _take_tokens(self, quota: QuotaSpec, requests: int, now: float) -> None:
        if not requests or quota.rate_per_s is None:
            return
        burst = float(quota.burst or 1)
        tokens, at = self.tokens.get(quota.name, (burst, now))
        tokens = min(burst, tokens + (now - at) * quota.rate_per_s)
        assert tokens >= min(requests, burst) - TOLERANCE, f"quota {quota.name} is exceeded"
        self.tokens[quota.name] = (tokens - requests, now)

    def running(self) -> dict[str, Book]:
        return {action_id: book for action_id, book in self.actions.items() if book.state == "running"}

    def check(self) -> None:
        self._check_cores()
        self._check_cells()
        self._check_memory()
        running = self.running().values()
        for quota in QUOTAS:
            if quota.concurrency is not None:
                assert sum(book.action.cost.least(f"quota:{quota.name}") for book in running) <= quota.concurrency
        assert sum(e.state == "opening" for e in self.environments.values()) <= self.limits.starting_limit
        for book in self.actions.values():
            assert book.ends == (book.state not in ("waiting", "running"))

    def _check_cores(self) -> None:
        held: Counter[tuple[str | None, int]] = Counter()
        pods = {e.id: e for e in self.environments.values() if e.pod_core_ids}
        for pod in pods.values():
            held.update((pod.node, core) for core in pod.pod_core_ids)
        in_pods: Counter[tuple[str | None, int]] = Counter()
        for book in self.running().values():
            if book.action.kind == "cpu.open":
                continue
            pod_of = pods.get(book.action.environment or "")
            if pod_of is not None:
                assert set(book.grant.core_ids) <= set(pod_of.pod_core_ids)
            (in_pods if pod_of is not None else held).update((book.grant.node, core) for core in book.grant.core_ids)
        for books in (held, in_pods):
            assert max(books.values(), default=0) <= 1, "a core is granted twice"
        for node, core in held:
            assert core < self.nodes[node or ""].cores

    def _check_cells(self) -> None:
        users: dict[tuple[str, int], list[Book]] = {}
        for book in self.running().values():
            for cell in book.grant.cell_ids:
                assert cell < self.nodes[book.grant.node].cells
                users.setdefault((book.grant.node, cell), []).append(book)
        for books in users.values():
            assert len({(book.action.service, book.grant.cell_ids) for book in books}) == 1, "a cell is granted twice"
            service = next(s for s in SERVICES if s.name == books[0].action.service)
            assert len(books) <= service.max_concurrency

    def memory_held(self, node: str) -> int:
        of_environments = sum(e.memory_mb for e in self.environments.values() if e.node == node)
        running = [book for book in self.running().values() if book.grant.node == node and book.action.environment is None]
        return of_environments + sum(book.action.cost.least(MEMORY_MB) for book in running)

    def _check_memory(self) -> None:
        for spec in self.nodes.values():
            assert self.memory_held(spec.name) <= spec.memory_mb


def make_core(policy: str, limits: Limits) -> Core:
    return Core(make_policy(policy), limits=limits, services=SERVICES, quotas=QUOTAS)


class CoreMachine(RuleBasedStateMachine):
    """Every event, in any order, with jumps of time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.number = 0
        self.log: list[tuple[events.Event, float, list[commands.Command]]] = []

    @initialize(
        policy=st.sampled_from(POLICIES),
        queue_limit=st.sampled_from([1 << 60, 6]),
        lease_s=st.sampled_from([None, 30.0]),
        beat_s=st.sampled_from([None, 20.0]),
        starting_limit=st.sampled_from([1 << 60, 1]),
        starts_per_s=st.sampled_from([None, 0.5]),
    )
    def begin(self, policy: str, **limits: Any) -> None:
        self.policy = policy
        self.limits = Limits(**limits)
        self.core = make_core(policy, self.limits)
        self.ledger = Ledger(self.limits, shares=policy.startswith("static"))

    def handle(self, event: events.Event) -> None:
        out = self.core.handle(event, self.now)
        self.log.append((event, self.now, out))
        joined = event.node if isinstance(event, events.NodeJoined) else None
        if joined is not None and joined.name not in self.ledger.nodes:
            self._note_joined(joined)
            joined = None
        for command in out:
            if joined is not None and isinstance(command, commands.NoteNode) and command.state == "up":
                self._note_joined(joined)
            self.ledger.take(command, self.now)

    def _note_joined(self, spec: NodeSpec) -> None:
        self.ledger.nodes[spec.name] = spec
        self.ledger.resident[spec.name] = {}

    def submit(self, action: Action, late_s: float = 0.0) -> None:
        self.number += 1
        action_id = f"a{self.number}"
        self.ledger.actions[action_id] = Book(action)
        self.handle(events.Submitted(id=action_id, action=action, submitted_at=self.now - late_s))

    @rule(seconds=st.sampled_from([0.0, 0.1, 0.5, 1.0, 7.0, 100.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.handle(events.Tick())

    @rule()
    def wake(self) -> None:
        at = self.core.next_wake(self.now)
        if at is not None:
            self.now = max(self.now, at)
            self.handle(events.Tick())

    @rule(
        name=st.sampled_from(NODES),
        cores=st.sampled_from([0, 1, 2, 4]),
        cells=st.sampled_from([0, 1, 2, 4]),
        memory_mb=st.sampled_from([100, 1000]),
        cell_memory_mb=st.sampled_from([50, 200]),
        labels=st.sampled_from([frozenset(), frozenset({"x"})]),
        pools=st.sampled_from([("cpu",), ("gpu",), ("api",), ("cpu", "gpu", "api")]),
    )
    def node_joins(self, **spec: Any) -> None:
        self.handle(events.NodeJoined(node=NodeSpec(**spec)))

    @rule(name=st.sampled_from(NODES), left=st.booleans())
    def node_is_lost(self, name: str, left: bool) -> None:
        self.handle(events.NodeLost(name=name, reason="gone", left=left))

    @rule(name=st.sampled_from(NODES), honest=st.booleans())
    def node_beats(self, name: str, honest: bool) -> None:
        running = frozenset(i for i, book in self.ledger.running().items() if book.grant.node == name)
        stand = {e.id for e in self.ledger.environments.values() if e.node == name and e.state in ("open", "closing")}
        held = frozenset(stand - set(self.ledger.closing)) if honest else frozenset(stand)
        self.handle(events.NodeBeat(name=name, running=running if honest else frozenset(), environments=held))

    @rule(
        environment=st.sampled_from(ENVIRONMENTS),
        job=st.sampled_from(JOBS),
        trajectory=st.sampled_from(TRAJECTORIES),
        cost=st.sampled_from([{}, {MEMORY_MB: 60}, {MEMORY_MB: 500}, {CORES: 3}]),
        requires=st.sampled_from([(), (), ("x",)]),
        queue_timeout_s=st.sampled_from([None, 5.0]),
    )
    def open(self, cost: dict[str, int], **fields: Any) -> None:
        self.submit(Action(kind="cpu.open", cost=Cost.of(**cost), **fields))

    @rule(
        environment=st.sampled_from(ENVIRONMENTS),
        kind=st.sampled_from(["cpu.exec", "cpu.exec", "cpu.exec", "cpu.read_file"]),
        job=st.sampled_from(JOBS),
        trajectory=st.sampled_from(TRAJECTORIES),
        session=st.sampled_from([None, "main", "other"]),
        cores=st.sampled_from([(1,), (1, 2, 4), (2,), (2, 4), (4,)]),
        work_s=st.sampled_from([None, 0.0, 3.0, 50.0]),
        memory_mb=st.sampled_from([None, 60]),
        quota=st.sampled_from([None, None, None, "narrow", "even"]),
        priority=st.sampled_from([5, 5, 9]),
        queue_timeout_s=st.sampled_from([None, None, 5.0]),
        idempotent=st.booleans(),
    )
    def run_in_environment(self, kind: str, cores: tuple[int, ...], memory_mb: int | None, quota: str | None, **fields: Any) -> None:
        amounts: dict[str, tuple[int, ...]] = {}
        if kind == "cpu.exec":
            amounts = {CORES: cores} | ({f"quota:{quota}": (1,)} if quota else {})
        if memory_mb:
            amounts[MEMORY_MB] = (memory_mb,)
        self.submit(Action(kind=kind, cost=Cost(amounts), curve=Amdahl(0.9), **fields), late_s=0.5)

    @rule(environment=st.sampled_from(ENVIRONMENTS), job=st.sampled_from(JOBS))
    def close(self, environment: str, job: str) -> None:
        self.submit(Action(kind="cpu.close", environment=environment, job=job))

    @rule(
        cost=st.sampled_from(
            [
                {CORES: (1,)},
                {CORES: (1, 2, 4)},
                {CORES: (3,), MEMORY_MB: (60,)},
                {CORES: (1,), MEMORY_MB: (60, 600)},
                {CORES: (8,)},
                {CORES: (1, 2), "quota:even": (1,)},
                {CORES: (1,), CELLS: (1,)},
                {MEMORY_MB: (60,)},
                {},
            ]
        ),
        curve=st.sampled_from([FLAT, Amdahl(0.95)]),
        job=st.sampled_from(JOBS),
        trajectory=st.sampled_from(TRAJECTORIES),
        requires=st.sampled_from([(), (), ("x",)]),
        work_s=st.sampled_from([None, 3.0]),
        queue_timeout_s=st.sampled_from([None, None, 5.0]),
        idempotent=st.booleans(),
        priority=st.sampled_from([5, 5, 9]),
    )
    def run_anywhere(self, cost: dict[str, tuple[int, ...]], **fields: Any) -> None:
        self.submit(Action(kind="build", cost=Cost(cost), **fields))

    @rule(
        service=st.sampled_from([*(spec.name for spec in SERVICES), "unheard-of"]),
        cells=st.sampled_from([None, (1,), (2,), (1, 2), (4,)]),
        other=st.sampled_from([{}, {}, {MEMORY_MB: (60,)}, {"quota:narrow": (1,)}]),
        job=st.sampled_from(JOBS),
        trajectory=st.sampled_from(TRAJECTORIES),
        requires=st.sampled_from([(), (), ("x",)]),
        queue_timeout_s=st.sampled_from([None, None, 5.0]),
        idempotent=st.booleans(),
    )
    def score(self, cells: tuple[int, ...] | None, other: dict[str, tuple[int, ...]], **fields: Any) -> None:
        self.submit(Action(kind="gpu.score", cost=Cost({**({CELLS: cells} if cells else {}), **other}), **fields))

    @rule(
        cost=st.sampled_from(
            [
                {"quota:even": (1,)},
                {"quota:burst": (1,)},
                {"quota:burst": (5,)},
                {"quota:narrow": (1,)},
                {"quota:narrow": (2,)},
                {"quota:even": (1,), "quota:narrow": (1,)},
                {"quota:even": (2,), "quota:burst": (1,), MEMORY_MB: (60,)},
                {"quota:unheard-of": (1,)},
            ]
        ),
        job=st.sampled_from(JOBS),
        trajectory=st.sampled_from(TRAJECTORIES),
        requires=st.sampled_from([(), (), ("x",)]),
        queue_timeout_s=st.sampled_from([None, None, 5.0]),
        idempotent=st.booleans(),
    )
    def call(self, cost: dict[str, tuple[int, ...]], **fields: Any) -> None:
        self.submit(Action(kind="api.call", cost=Cost(cost), **fields))

    def some_running(self, pick: int) -> tuple[str, Book] | None:
        running = sorted(self.ledger.running().items())
        return running[pick % len(running)] if running else None

    @rule(pick=st.integers(0, 50))
    def starts_running(self, pick: int) -> None:
        chosen = self.some_running(pick)
        if chosen is not None:
            self.handle(events.Started(id=chosen[0], attempt=chosen[1].grant.attempt, at=self.now))

    @rule(
        pick=st.integers(0, 50),
        status=st.sampled_from(["succeeded", "succeeded", "succeeded", "failed", "timed_out", "cancelled"]),
        execution_s=st.sampled_from([0.0, 0.5, 1e9]),
    )
    def finishes(self, pick: int, status: Any, execution_s: float) -> None:
        chosen = self.some_running(pick)
        if chosen is not None:
            attempt = chosen[1].grant.attempt
            self.handle(events.Finished(id=chosen[0], attempt=attempt, status=status, execution_s=execution_s))
            assert chosen[1].state == status

    @rule(pick=st.integers(0, 200), attempt=st.sampled_from([0, 7]))
    def a_stale_report_changes_nothing(self, pick: int, attempt: int) -> None:
        action_id = f"a{pick % (self.number + 2)}"
        self.handle(events.Finished(id=action_id, attempt=attempt, status="succeeded"))
        assert self.log[-1][2] == []
        self.handle(events.Started(id=action_id, attempt=attempt, at=self.now))

    @rule(pick=st.integers(0, 200))
    def a_message_comes_twice(self, pick: int) -> None:
        live = sorted(i for i, book in self.ledger.actions.items() if not book.ends)
        if live:
            action_id = live[pick % len(live)]
            self.handle(events.Submitted(id=action_id, action=self.ledger.actions[action_id].action, submitted_at=self.now))

    @rule(picks=st.lists(st.integers(1, 60), max_size=4))
    def cancel_some(self, picks: list[int]) -> None:
        self.handle(events.Cancelled(ids=tuple(f"a{pick}" for pick in picks)))

    @rule(job=st.sampled_from(JOBS), trajectory=st.sampled_from([None, *TRAJECTORIES]))
    def cancel_trajectory(self, job: str, trajectory: str | None) -> None:
        self.handle(events.Cancelled(job=job, trajectory=trajectory))
        for book in self.ledger.actions.values():
            mine = book.action.job == job and trajectory in (None, book.action.trajectory)
            assert not (mine and book.state == "waiting" and book.action.kind != "cpu.close")

    @rule(environment=st.sampled_from(ENVIRONMENTS))
    def environment_closed(self, environment: str) -> None:
        self.handle(events.EnvironmentClosed(id=environment, reason="it is no more"))

    @invariant()
    def books_are_in_order(self) -> None:
        if hasattr(self, "core"):
            self.ledger.check()
            self.check_inside()

    def check_inside(self) -> None:
        """Compare the core's own indexes with the ledger and with each other."""
        state = self.core.state
        assert set(state.waiting) == {i for i, book in self.ledger.actions.items() if book.state == "waiting"}
        assert set(state.running) == set(self.ledger.running())
        assert state.waiting_by_job == Counter(waiting.action.job for waiting in state.waiting.values())
        assert state.dirty == {}
        assert not state.room_returned
        assert set(state.environments) == set(self.ledger.environments)
        assert self.core._environments._opening == sum(e.state == "opening" for e in state.environments.values())
        self.check_places()
        for node in state.nodes.values():
            self.check_node(node)
        for name, quota in state.quotas.items():
            assert quota.running == sum(r.waiting.action.cost.least(f"quota:{name}") for r in state.running.values())

    def check_places(self) -> None:
        """Every waiting action waits in exactly one place; what is parked belongs to its environment."""
        state = self.core.state
        groups = [node.cores for node in state.nodes.values()] + list(state.pods.values())
        queues = [state.floating_cells, state.floating_cores, state.opens, state.unplaced]
        queues += [group.queue for group in groups] + [quota.queue for quota in state.quotas.values()]
        places = [waiting.id for queue in queues for waiting in queue]
        for environment in state.environments.values():
            places += [waiting.id for waiting in environment.parked]
            assert {waiting.id for waiting in environment.parked} <= set(environment.actions)
            assert set(environment.actions) <= set(state.waiting) | set(state.running)
            assert set(environment.sessions.values()) <= set(environment.actions)
            assert (environment.node is None) == (environment.state == "waiting")
            assert environment.node is None or environment.id in state.nodes[environment.node].environments
        assert sorted(places) == sorted(state.waiting)

    def check_node(self, node: Any) -> None:
        state, name = self.core.state, node.spec.name
        running = {i for i, book in self.ledger.running().items() if book.grant.node == name}
        assert set(node.running) == running
        assert node.memory_free == node.spec.memory_mb - self.ledger.memory_held(name)
        assert set(node.environments) == {e.id for e in state.environments.values() if e.node == name}
        pods = [state.pods[e] for e in node.environments if e in state.pods]
        cores = [core for group in (node.cores, *pods) for core in group._free]
        for group in (node.cores, *pods):
            assert group._free == sorted(set(group._free))
            assert set(group.elastic) <= set(group.running)
            cores += [core for r in group.running.values() for core in r.grant.core_ids]
            assert group.capacity == len(group._free) + sum(len(r.grant.core_ids) for r in group.running.values())
        assert sorted(cores) == list(range(node.spec.cores))
        cells = node.cells._free + [cell for instance in node.cells.instances for cell in instance.cell_ids]
        assert sorted(cells) == list(range(node.spec.cells))
        assert node.cells._free == sorted(node.cells._free)
        assert set(node.cells.running) == {i for instance in node.cells.instances for i in instance.active}

    @precondition(lambda self: len(self.ledger.actions) > 3)
    @rule()
    def everything_drains(self) -> None:
        """With every running action ended, every environment closed and time enough, only the impossible waits."""
        for _ in range(200):
            before = len(self.log)
            for action_id, book in list(self.ledger.running().items()):
                if book.state == "running":
                    attempt = book.grant.attempt
                    self.handle(events.Finished(id=action_id, attempt=attempt, status="succeeded"))
                    self.books_are_in_order()
            for environment in list(self.ledger.environments.values()):
                if environment.state == "open":
                    self.close(environment.id, environment.job)
                elif environment.id in self.ledger.closing:
                    self.handle(events.EnvironmentClosed(id=environment.id, reason="closed"))
            at = self.core.next_wake(self.now)
            if at is not None:
                self.now = max(self.now, at)
                self.handle(events.Tick())
            if len(self.log) == before:
                break
        else:
            raise AssertionError("it never comes to rest")
        for action_id, book in self.ledger.actions.items():
            assert book.state != "waiting" or not self.possible(book.action), f"{action_id} waits for nothing"

    def possible(self, action: Action) -> bool:
        """Say whether a node that is up and empty could run the action."""
        waiting = next(w for w in self.core.state.waiting.values() if w.action is action)
        on_cells = action.kind.startswith("gpu.")
        pool = "gpu" if on_cells else "api" if action.cost.quotas and CORES not in action.cost.amounts else "cpu"
        service = next((s for s in SERVICES if s.name == action.service), None)
        if self.policy.startswith("static") and on_cells:
            return False  # its service may own fewer cells than it asks for
        if action.environment is not None and action.kind != "cpu.open":
            return self.ledger.environments[action.environment].state != "waiting"
        for spec in self.ledger.nodes.values():
            able = pool in spec.pools and set(action.requires) <= spec.labels and action.cost.least(MEMORY_MB) <= spec.memory_mb
            if on_cells:
                able = able and service is not None and service.memory_mb <= spec.cell_memory_mb and waiting.least <= spec.cells
            elif pool == "cpu":
                pod = self.core.state.policy.pod_cores() if action.kind == "cpu.open" else 0
                least = max(action.cost.least(CORES), pod, action.kind == "cpu.open")
                able = able and least <= spec.cores
            if able:
                return True
        return False

    def teardown(self) -> None:
        """The same events lead to the same commands, and a fresh core to the same end."""
        if not self.log:
            return
        again = make_core(self.policy, self.limits)
        for event, now, out in self.log:
            assert again.handle(event, now) == out


TestCore = CoreMachine.TestCase
TestCore.settings = settings(
    max_examples=150,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
