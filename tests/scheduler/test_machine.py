"""The core under any events in any order: what must hold after each of them, whatever the policy.

The machine keeps the books of a `Ledger` (ledger.py), which knows the commands only; the core's own indexes are compared
with them in inside.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler.core.nodes import may_leave
from scheduler.model import Limits, NodeSpec, commands, events
from scheduler.model.state import State
from scheduler.quotas.answers import may_wait_again
from tangram.action import CELLS, CORES, MEMORY_MB, Action, Cost
from tangram.elasticity import FLAT, Amdahl

from .inside import check_inside
from .ledger import SERVICES, Book, Ledger
from .scene import CLASSES, ENVIRONMENTS, JOBS, NODES, POLICIES, SELDOM, TRAJECTORIES, make_core


def in_domains(cores: int, count: int) -> tuple[tuple[int, ...], ...]:
    """Return cores dealt out to `count` domains, under ids that do not begin at 0; nothing for no domains."""
    domains = (tuple(range(10 + number, 10 + cores, count)) for number in range(count))
    return tuple(domain for domain in domains if domain)


def journaled(state: State, spent: list[tuple[str, float, Action]], now: float) -> Iterator[events.Event]:
    """Return what a journal says of nodes, environments, quotas and what runs, in the order in which the service tells it."""
    yield from (events.NodeDrained(name=name, draining=True) for name in state.draining)
    declared = frozenset(spec.name for spec in SERVICES)  # so nothing is brought onto a node's cells until it has reported its instances
    yield from (events.NodeJoined(node=replace(node.spec, services=declared), resumed=True) for node in state.nodes.values())
    closing = {}
    for one in state.environments.values():
        closing[one.id] = {"close_requested": one.close_requested, "close_cause": one.cause}
        if one.state in ("open", "closing"):
            yield events.EnvironmentOpened(
                id=one.id,
                node=one.node or "",
                job=one.job,
                trajectory=one.trajectory,
                memory_mb=one.memory_mb,
                pod_core_ids=one.pod_core_ids,
                used_at=one.last_used,
                closing=one.close_requested if one.state == "closing" else "",
                cause=one.cause,
                ends_at=one.ends_at,
            )
    for action_id, at, action in spent:
        if action_id not in state.running and at > now - 120.0:
            yield events.Spent(action=action, at=at)
    for running in state.running.values():
        waiting, action = running.waiting, running.waiting.action
        yield events.Resumed(
            id=waiting.id,
            action=action,
            submitted_at=waiting.submitted_at,
            received_at=waiting.received_at,
            granted_at=running.granted_at,
            grant=replace(running.grant, not_before=0.0, restore=False, evict=()),
            **(closing.get(action.environment, {}) if action.kind == "cpu.open" else {}),
        )


class CoreMachine(RuleBasedStateMachine):
    """Every event, in any order, with jumps of time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.number = 0
        self.log: list[tuple[events.Event, float, list[commands.Command]]] = []
        self.spent: list[tuple[str, float, Action]] = []

    @initialize(
        policy=st.sampled_from(["elastic", "elastic", "elastic", *POLICIES]),
        queue_limit=st.sampled_from([1 << 60, 6]),
        lease_s=st.sampled_from([None, 30.0]),
        starting_limit=st.sampled_from([1 << 60, 1]),
        starts_per_s=st.sampled_from([None, 0.5]),
        weights=st.sampled_from([{}, {"j1": 4.0}]),
        window_s=st.sampled_from([60.0, 0.0]),
        breaker_share=st.sampled_from([1.0, 0.2]),
        breaker_least=st.sampled_from([1, 4]),
        nodes=st.sampled_from([1, 2, 0]),
        cores=st.sampled_from([8, 4]),
        domains=st.sampled_from([0, 2, 3]),
    )
    def begin(self, policy: str, nodes: int, cores: int, domains: int, **limits: Any) -> None:
        self.policy = policy
        self.limits = Limits(**limits)
        self.core = make_core(policy, self.limits)
        self.ledger = Ledger(self.limits, shares=policy.startswith("static"))
        for name in NODES[:nodes]:
            offered: dict[str, Any] = {"cores": cores, "domains": in_domains(cores, domains), "cells": 2, "memory_mb": 1000}
            self.handle(events.NodeJoined(node=NodeSpec(name=name, pools=("cpu", "gpu", "api"), **offered)))
        for environment, job in zip(ENVIRONMENTS, JOBS, strict=True):
            if nodes:
                self.submit(Action(kind="cpu.open", environment=environment, job=job))
                self.wake()
        for action_id, book in self.ledger.running().items():
            self.handle(events.Finished(id=action_id, attempt=book.grant.attempt, status="succeeded"))

    def handle(self, event: events.Event) -> None:
        out = self.core.handle(event, self.now)
        self.log.append((event, self.now, out))
        if isinstance(event, events.NodeJoined):
            self.ledger.nodes[event.node.name] = event.node
            self.ledger.cells.join(event.node)
        for command in out:
            if isinstance(command, commands.Start):
                self.spent.append((command.id, self.now, self.ledger.actions[command.id].action))
            self.ledger.take(command, self.now)
            if isinstance(command, commands.Start | commands.Resize):
                self.ledger.check_cores()  # after each of them: what is carried out in order never grants a core twice

    def submit(self, action: Action, late_s: float = 0.0) -> None:
        self.number += 1
        action_id = f"a{self.number}"
        self.ledger.actions[action_id] = Book(action)
        self.handle(events.Submitted(id=action_id, action=action, submitted_at=self.now - late_s))

    @rule(seconds=st.sampled_from([0.0, 0.1, 0.5, 2.0, 7.0, 20.0, 100.0]))
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
        cores=st.sampled_from([0, 1, 2, 4, 8]),
        cells=st.sampled_from([0, 1, 2, 4]),
        memory_mb=st.sampled_from([100, 1000]),
        cell_memory_mb=st.sampled_from([50, 200]),
        labels=st.sampled_from([frozenset(), frozenset({"x"})]),
        pools=st.sampled_from([("cpu",), ("gpu",), ("api",), ("cpu", "gpu", "api"), ("cpu", "gpu", "api")]),
        domains=st.sampled_from([0, 2, 3]),
    )
    def node_joins(self, cores: int, domains: int, **spec: Any) -> None:
        if spec["name"] not in self.ledger.nodes:
            self.handle(events.NodeJoined(node=NodeSpec(cores=cores, domains=in_domains(cores, domains), **spec)))

    @rule(name=st.sampled_from(NODES), left=st.booleans(), seldom=SELDOM, stored=st.sampled_from([0, 0, 1, 2]))
    def node_is_lost(self, name: str, left: bool, seldom: bool, stored: int) -> None:
        if seldom:
            ran = [action_id for action_id, book in self.ledger.running().items() if book.grant.node == name][:stored]
            ended = tuple(events.StoredEnd(id=one, status=("succeeded", "failed")[number]) for number, one in enumerate(ran))
            self.handle(events.NodeLost(name=name, reason="gone", left=left, ended=ended))
            assert all(self.ledger.actions[end.id].state == end.status for end in ended if name not in self.ledger.nodes)

    @rule(name=st.sampled_from(NODES), stored=st.sampled_from([0, 0, 1]))
    def node_is_silent(self, name: str, stored: int) -> None:
        there = [one for one, book in self.ledger.running().items() if book.grant.node == name]
        ran = [one for one in there if may_leave(self.core.state, self.core.state.running[one])]
        ended = tuple(events.StoredEnd(id=one, status="succeeded") for one in ran[:stored])
        self.handle(events.NodeSilent(name=name, reason="quiet", ended=ended))
        assert (name in self.ledger.silent) == (name in self.ledger.nodes)

    @rule(
        name=st.sampled_from(NODES),
        environments=st.frozensets(st.sampled_from(ENVIRONMENTS)),
        stored=st.sampled_from([0, 0, 1]),
        seldom=SELDOM,
    )
    def worker_is_replaced(self, name: str, environments: frozenset[str], stored: int, seldom: bool) -> None:
        """Environments are the only thing that outlives a worker: nodes with instances of services are lost."""
        group = self.core.pools.gpu.groups.get(name)
        if seldom and not (group is not None and group.instances):
            ran = [one for one, book in self.ledger.running().items() if book.grant.node == name]
            ended = tuple(events.StoredEnd(id=one, status="succeeded") for one in ran[:stored])
            self.ledger.replaced = name
            self.handle(events.WorkerReplaced(name=name, environments=environments, ended=ended))
            self.ledger.replaced = ""
            stand = [one.id for one in self.ledger.environments.values() if one.node == name and one.state == "open"]
            assert name not in self.ledger.nodes or set(stand) <= environments

    @rule(name=st.sampled_from(NODES), draining=st.sampled_from([True, False, False]))
    def an_operator_drains(self, name: str, draining: bool) -> None:
        self.handle(events.NodeDrained(name=name, draining=draining))

    @rule()
    def restores_end(self) -> None:
        while self.ledger.restores:
            name, one = self.ledger.restores.popitem()
            self.ledger.cells.finish(name)
            there = events.ServiceChanged(node=one.node, service=one.service, cell_ids=one.cell_ids, state="resident")
            self.handle(there)

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
        requires=st.sampled_from([(), (), (), (), ("x",)]),
        queue_timeout_s=st.sampled_from([None, 5.0]),
    )
    def open(self, cost: dict[str, int], **fields: Any) -> None:
        self.submit(Action(kind="cpu.open", cost=Cost.of(**cost), **fields))

    @rule(
        place=st.sampled_from([*zip(ENVIRONMENTS, JOBS, strict=True), (ENVIRONMENTS[0], JOBS[1])]),
        kind=st.sampled_from(["cpu.exec", "cpu.exec", "cpu.exec", "cpu.read_file"]),
        trajectory=st.sampled_from(TRAJECTORIES),
        session=st.sampled_from([None, None, "main", "other"]),
        cores=st.sampled_from([(1,), (1,), (1, 2, 4), (2,), (2, 4), (4,)]),
        work_s=st.sampled_from([None, 0.0, 3.0, 50.0]),
        memory_mb=st.sampled_from([None, None, 60]),
        quota=st.sampled_from([None, None, None, "narrow", "even"]),
        priority=st.sampled_from([5, 5, 9]),
        queue_timeout_s=st.sampled_from([None, None, 5.0]),
        idempotent=st.booleans(),
        preemptible=st.sampled_from([True, True, True, False]),
        action_class=CLASSES,
        times=st.sampled_from([1, 1, 2, 6]),
    )
    def run_in_environment(
        self, place: tuple[str, str], kind: str, cores: tuple[int, ...], memory_mb: int | None, quota: str | None, times: int, **fields: Any
    ) -> None:
        amounts: dict[str, tuple[int, ...]] = {}
        if kind == "cpu.exec":
            amounts = {CORES: cores} | ({f"quota:{quota}": (1,)} if quota else {})
        if memory_mb:
            amounts[MEMORY_MB] = (memory_mb,)
        for _ in range(times):
            environment, job = place
            self.submit(Action(kind=kind, environment=environment, job=job, cost=Cost(amounts), curve=Amdahl(0.9), **fields), late_s=0.5)

    @rule(environment=st.sampled_from(ENVIRONMENTS), job=st.sampled_from(JOBS), seldom=SELDOM)
    def close(self, environment: str, job: str, seldom: bool = True) -> None:
        if seldom:
            self.submit(Action(kind="cpu.close", environment=environment, job=job))

    @rule(
        cost=st.sampled_from(
            [
                {CORES: (1,)},
                {CORES: (1, 2, 4)},
                {CORES: (1, 2, 3, 4)},
                {CORES: (1, 8)},
                {CORES: (2, 3, 8)},
                {CORES: (3,), MEMORY_MB: (60,)},
                {CORES: (1,), MEMORY_MB: (60, 600)},
                {CORES: (8,)},
                {CORES: (1, 2), "quota:even": (1,)},
                {CORES: (1,), CELLS: (1,)},
                {MEMORY_MB: (60,)},
                {},
            ]
        ),
        curve=st.sampled_from([FLAT, Amdahl(0.98), Amdahl(0.9), Amdahl(0.5)]),
        job=st.sampled_from(JOBS),
        trajectory=st.sampled_from(TRAJECTORIES),
        requires=st.sampled_from([(), (), (), (), ("x",)]),
        work_s=st.sampled_from([None, 3.0, 50.0]),
        queue_timeout_s=st.sampled_from([None, None, 5.0]),
        idempotent=st.booleans(),
        priority=st.sampled_from([5, 5, 9]),
        action_class=CLASSES,
        times=st.sampled_from([1, 1, 3]),
    )
    def run_anywhere(self, cost: dict[str, tuple[int, ...]], times: int, **fields: Any) -> None:
        for _ in range(times):
            self.submit(Action(kind="build", cost=Cost(cost), **fields))

    @rule(
        service=st.sampled_from([*(spec.name for spec in SERVICES), "unheard-of"]),
        cells=st.sampled_from([None, (1,), (2,), (1, 2), (4,)]),
        other=st.sampled_from([{}, {}, {MEMORY_MB: (60,)}, {"quota:narrow": (1,)}]),
        job=st.sampled_from(JOBS),
        trajectory=st.sampled_from(TRAJECTORIES),
        requires=st.sampled_from([(), (), (), (), ("x",)]),
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
                {"quota:costly": (1,)},
                {"quota:costly": (1,), "tokens:costly": (20,)},
                {"quota:costly": (1,), "tokens:costly": (61,)},
            ]
        ),
        job=st.sampled_from(JOBS),
        trajectory=st.sampled_from(TRAJECTORIES),
        requires=st.sampled_from([(), (), (), (), ("x",)]),
        queue_timeout_s=st.sampled_from([None, None, 5.0]),
        idempotent=st.booleans(),
    )
    def call(self, cost: dict[str, tuple[int, ...]], **fields: Any) -> None:
        self.submit(Action(kind="api.call", cost=Cost(cost), **fields))

    def some_running(self, pick: int) -> tuple[str, Book] | None:
        running = sorted(self.ledger.running().items())
        return running[pick % len(running)] if running else None

    @rule(pick=st.integers(0, 50), stale=SELDOM)
    def never_arrives(self, pick: int, stale: bool) -> None:
        chosen = self.some_running(pick)
        if chosen is not None:
            chosen[1].refused = True
            self.handle(events.NeverArrived(id=chosen[0], attempt=chosen[1].grant.attempt + stale))
            chosen[1].refused = False
            assert not stale or self.log[-1][2] == []

    @rule(pick=st.integers(0, 50))
    def starts_running(self, pick: int) -> None:
        chosen = self.some_running(pick)
        if chosen is not None:
            self.handle(events.Started(id=chosen[0], attempt=chosen[1].grant.attempt, at=self.now))

    @rule(pick=st.integers(0, 50), at=st.sampled_from([0.0, 1e9]), stale=st.booleans())
    def is_sent(self, pick: int, at: float, stale: bool) -> None:
        chosen = self.some_running(pick)
        if chosen is not None:
            self.handle(events.Sent(id=chosen[0], attempt=chosen[1].grant.attempt + stale, at=at or self.now))

    @rule(
        pick=st.integers(0, 50),
        status=st.sampled_from(["succeeded", "succeeded", "succeeded", "failed", "timed_out", "cancelled"]),
        execution_s=st.sampled_from([0.0, 0.5, 3.0, 1e9]),
        cpu_s=st.sampled_from([0.0, 0.1, 0.5, 20.0]),
        waited_s=st.sampled_from([0.0, 0.0, 3.0, 1e9]),
        slept_s=st.sampled_from([0.0, 0.0, 2.0, 1e9]),
    )
    def finishes(self, pick: int, status: Any, **fields: Any) -> None:
        chosen = self.some_running(pick)
        if chosen is not None:
            attempt = chosen[1].grant.attempt
            self.handle(events.Finished(id=chosen[0], attempt=attempt, status=status, **fields))
            assert chosen[1].state == status

    @rule(
        pick=st.integers(0, 50),
        status=st.sampled_from([200, 200, 429, 503, 502]),
        retry_after_s=st.sampled_from([None, 0.0, 2.0]),
        tokens=st.sampled_from([None, 0, 3, 40]),
        requests=st.sampled_from([1, 1, 3]),
    )
    def is_answered(self, pick: int, **fields: Any) -> None:
        calling = sorted((i, b) for i, b in self.ledger.running().items() if b.action.kind == "api.call")
        if not calling:
            return
        action_id, book = calling[pick % len(calling)]
        answer = events.Answer(**fields)
        again = answer.refuses and may_wait_again(book.action, book.grant)
        book.refused = again
        self.handle(events.Finished(id=action_id, attempt=book.grant.attempt, status="succeeded", answer=answer, waits_again=again))
        if again:
            assert book.state in ("cancelled" if book.stopped else "waiting", "running")
        else:
            assert book.state == "succeeded"

    @rule(pick=st.integers(0, 50), cpu_s=st.sampled_from([0.0, 0.1, 5.0, 100.0]), stale=st.booleans())
    def has_used(self, pick: int, cpu_s: float, stale: bool) -> None:
        behind = sorted((i, b) for i, b in self.ledger.running().items() if b.grant.background)
        chosen = behind[pick % len(behind)] if behind else self.some_running(pick)
        if chosen is not None:
            attempt = chosen[1].grant.attempt + stale
            self.handle(events.Used(id=chosen[0], attempt=attempt, background_cpu_s=cpu_s))
            assert not stale or self.log[-1][2] == []

    @rule(pick=st.integers(0, 50), seldom=SELDOM)
    def cancel_in_the_background(self, pick: int, seldom: bool) -> None:
        behind = sorted(i for i, b in self.ledger.running().items() if b.grant.background)
        if behind and not seldom:
            self.handle(events.Cancelled(ids=(behind[pick % len(behind)],)))
            assert self.ledger.actions[behind[pick % len(behind)]].stopped

    @rule(pick=st.integers(0, 60), attempt=st.sampled_from([0, 7]))
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

    @rule(picks=st.lists(st.integers(1, 60), max_size=2))
    def cancel_some(self, picks: list[int]) -> None:
        self.handle(events.Cancelled(ids=tuple(f"a{pick}" for pick in picks)))

    @rule(job=st.sampled_from(JOBS), trajectory=st.sampled_from([None, *TRAJECTORIES]), seldom=SELDOM)
    def cancel_trajectory(self, job: str, trajectory: str | None, seldom: bool) -> None:
        if not seldom:
            return
        self.handle(events.Cancelled(job=job, trajectory=trajectory))
        for book in self.ledger.actions.values():
            mine = book.action.job == job and trajectory in (None, book.action.trajectory)
            assert not (mine and book.state == "waiting" and book.action.kind != "cpu.close")

    @rule(environment=st.sampled_from(ENVIRONMENTS), seldom=SELDOM)
    def environment_closed(self, environment: str, seldom: bool) -> None:
        if seldom:
            self.handle(events.EnvironmentClosed(id=environment, reason="it is no more"))

    @invariant()
    def books_are_in_order(self) -> None:
        if hasattr(self, "core"):
            self.ledger.check()
            check_inside(self.core, self.ledger)

    @precondition(lambda self: len(self.ledger.actions) > 3)
    @rule(seldom=SELDOM)
    def everything_drains(self, seldom: bool) -> None:
        """With every running action ended, every environment closed and time enough, only what no node may begin waits."""
        if not seldom:
            return
        for name in sorted(self.ledger.silent):
            self.node_beats(name, honest=True)
        for _ in range(200):
            before = len(self.log)
            self.restores_end()
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
        """Say whether a node that is up, empty and not draining could run the action."""
        waiting = next(w for w in self.core.state.waiting.values() if w.action is action)
        on_cells = action.kind.startswith("gpu.")
        pool = "gpu" if on_cells else "api" if action.cost.quotas and CORES not in action.cost.amounts else "cpu"
        service = next((s for s in SERVICES if s.name == action.service), None)
        if self.policy.startswith("static") and on_cells:
            return False  # its service may own fewer cells than it asks for
        if action.environment is not None and action.kind != "cpu.open":
            return self.ledger.environments[action.environment].state != "waiting"
        for spec in self.ledger.nodes.values():
            able = spec.name not in self.ledger.draining and pool in spec.pools
            able = able and set(action.requires) <= spec.labels and action.cost.least(MEMORY_MB) <= spec.memory_mb
            if on_cells:
                able = able and service is not None and service.memory_mb <= spec.cell_memory_mb and waiting.least <= spec.cells
            elif pool == "cpu":
                pod = (self.core.policy.rules.pod_cores or 0) if action.kind == "cpu.open" else 0
                least = max(action.cost.least(CORES), pod, action.kind == "cpu.open")
                able = able and least <= spec.cores
            if able:
                return True
        return False

    @rule()
    def another_scheduler_takes_over(self) -> None:
        """A fresh core that is told what a journal and the first beats would say holds what the one before it held."""
        self.teardown()
        old, instances = self.core.state, {name: list(group.instances) for name, group in self.core.pools.gpu.groups.items()}
        self.core, self.log, self.ledger.last_opening = make_core(self.policy, self.limits), [], float("-inf")
        self.ledger.silent.clear()
        for event in journaled(old, self.spent, self.now):
            self.inherit(event)
        for action_id, book in self.ledger.running().items():
            held = self.core.state.running[action_id].grant
            assert replace(held, not_before=0.0) == replace(book.grant, not_before=0.0, restore=False, evict=())
            book.grant = held
        for waiting in old.waiting.values():
            told = {"submitted_at": waiting.submitted_at, "received_at": waiting.received_at, "attempt": waiting.attempt}
            self.inherit(events.Submitted(id=waiting.id, action=waiting.action, **told))
        for name in old.nodes:
            for instance in instances[name]:
                state = "restoring" if instance.restoring else "resident"
                self.handle(events.ServiceChanged(node=name, service=instance.service, cell_ids=instance.cell_ids, state=state))
            self.handle(events.ServicesDeclared(node=name, services=frozenset(spec.name for spec in SERVICES)))
        self.handle(events.Tick())

    def inherit(self, event: events.Event) -> None:
        """Take in what is no news."""
        out = self.core.handle(event, self.now)
        self.log.append((event, self.now, out))
        for command in out:
            assert not isinstance(command, commands.Finish) or command.cause != "queue_full", "it was let in before"
            if not isinstance(command, commands.NoteNode):
                self.ledger.take(command, self.now)

    def teardown(self) -> None:
        """The same events lead to the same commands, and a fresh core to the same end."""
        if not self.log:
            return
        again = make_core(self.policy, self.limits)
        for event, now, out in self.log:
            assert again.handle(event, now) == out


TestCore = CoreMachine.TestCase
TestCore.settings = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
