"""Books kept from the core's commands alone, as workers would keep them, and what must hold in them at any time."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

from scheduler.model import Limits, NodeSpec, QuotaSpec, ServiceSpec, commands
from scheduler.model.lifecycle import NODE_HELD
from scheduler.sim.cell_books import CellBooks
from tangram.action import CELLS, CORES, MEMORY_MB, Action

SERVICES = (
    ServiceSpec(name="shared", memory_mb=10, restore_s=0.5, max_concurrency=2),
    ServiceSpec(name="single", cells=(1, 2), memory_mb=10, restore_s=0.5, instances_per_node=1),
    ServiceSpec(name="large", cells=(2,), memory_mb=100),
    ServiceSpec(name="small", memory_mb=20, max_concurrency=2, restore_s=0.1, warm=True),
    ServiceSpec(name="sized", cells=(1, 2), sizes=(2,)),
)
QUOTAS = (
    QuotaSpec(name="even", rate_per_s=2.0, concurrency=2),
    QuotaSpec(name="burst", rate_per_s=1.0, burst=3),
    QuotaSpec(name="narrow", concurrency=1),
    QuotaSpec(name="costly", tokens_per_min=60.0, concurrency=3),
)
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
    refused: bool = False


@dataclass
class Ledger:
    """Books kept from commands, with the checks that need no look inside the core."""

    limits: Limits
    shares: bool
    """Whether services own their cells from the start, so that nothing is ever restored."""
    actions: dict[str, Book] = field(default_factory=dict)
    nodes: dict[str, NodeSpec] = field(default_factory=dict)
    draining: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)
    replaced: str = ""
    """The node whose worker is being replaced: what the new one has not adopted is gone."""
    environments: dict[str, commands.NoteEnvironment] = field(default_factory=dict)
    cells: CellBooks = field(init=False)
    closing: list[str] = field(default_factory=list)
    tokens: dict[str, tuple[float, float]] = field(default_factory=dict)
    last_opening: float = float("-inf")
    restores: dict[str, commands.Restore] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cells = CellBooks({spec.name: spec for spec in SERVICES}, preloaded=self.shares)

    def take(self, command: commands.Command, now: float) -> None:
        match command:
            case commands.Start():
                self._start(command, now)
            case commands.Resize():
                self._resize(command)
            case commands.Stop():
                self._granted(command.id, command.attempt).stopped = True
            case commands.Requeue():
                book = self.actions[command.id]
                assert book.state == "running"
                assert book.refused or book.grant.node not in self.nodes or book.grant.node in {*self.silent, self.replaced}
                self.cells.finish(command.id)
                book.refused = False
                book.state, book.grant = "waiting", None
            case commands.Finish():
                book = self.actions[command.id]
                assert book.state in ("waiting", "running"), f"{command.id} ends twice"
                self.cells.finish(command.id)
                assert min(command.queue_s, command.background_s, command.overhead_s, command.execution_s) >= 0
                book.state, book.grant, book.ends = command.status, None, book.ends + 1
            case commands.NoteDraining():
                (self.draining.add if command.draining else self.draining.discard)(command.name)
            case commands.Restore():
                assert command.node in self.nodes
                assert command.node not in self.draining | self.silent, "a service is brought onto a node that takes nothing new"
                self.restores[self.cells.restore(command)] = command
            case commands.CloseEnvironment():
                assert self.environments[command.id].node == command.node
                self.closing.append(command.id)
            case commands.NoteEnvironment():
                self.environments[command.id] = command
                if command.state in ("closed", "lost"):
                    del self.environments[command.id]
                    self.closing = [e for e in self.closing if e != command.id]
            case commands.NoteNode():
                (self.silent.add if command.state == "silent" else self.silent.discard)(command.name)
                if command.state not in NODE_HELD:
                    del self.nodes[command.name]
                    self.restores = {name: one for name, one in self.restores.items() if one.node != command.name}

    def _resize(self, command: commands.Resize) -> None:
        book = self._granted(command.id, command.attempt)
        assert command.node == book.grant.node and command.node not in self.silent and not book.stopped
        assert len(set(command.core_ids)) == len(command.core_ids)
        assert book.grant.core_ids != command.core_ids, "a resize that changes nothing"
        assert command.background == (not command.core_ids)
        assert command.units in book.action.cost.amounts[CORES]
        if command.background:
            assert book.action.kind == "cpu.exec" and book.action.preemptible, "only such commands lose their cores"
            assert command.units == book.grant.units, "what its program was told does not change"
        else:
            assert command.units == len(command.core_ids)
        book.grant = replace(book.grant, units=command.units, core_ids=command.core_ids, background=command.background)

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
        assert grant.node not in self.silent or book.action.kind == "cpu.close", f"{command.id} begins on a silent node"
        book.state, book.grant, book.attempt = "running", grant, grant.attempt
        if book.action.kind == "cpu.open":
            if self.limits.starts_per_s:
                assert now >= self.last_opening + 1 / self.limits.starts_per_s - TOLERANCE
            self.last_opening = now
        elif CORES in book.action.cost.amounts:
            assert grant.units in book.action.cost.amounts[CORES]
            if grant.background:
                assert not grant.core_ids and book.action.kind == "cpu.exec" and book.action.preemptible
            else:
                assert len(set(grant.core_ids)) == len(grant.core_ids) == grant.units
        if book.action.environment is None or book.action.kind == "cpu.open":
            assert grant.node not in self.draining, f"{command.id} begins on a draining node"
        if book.action.environment is None:
            assert set(book.action.requires) <= self.nodes[grant.node].labels
        if grant.cell_ids:
            assert len(set(grant.cell_ids)) == len(grant.cell_ids) == grant.units
            assert grant.units in book.action.cost.amounts.get(CELLS, (1, 2))
            assert all(cell < self.nodes[grant.node].cells for cell in grant.cell_ids)
            self.cells.start(command.id, book.action.service or "", grant)
        for quota in QUOTAS:
            self._take_tokens(quota, book.action.cost.least(f"quota:{quota.name}"), now)

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
        self.check_cores()
        assert all(self.memory_held(spec.name) <= spec.memory_mb for spec in self.nodes.values())
        running = self.running().values()
        assert all(book.grant.node in self.nodes for book in running)
        for quota in QUOTAS:
            if quota.concurrency is not None:
                assert sum(book.action.cost.least(f"quota:{quota.name}") for book in running) <= quota.concurrency
        assert sum(e.state == "opening" for e in self.environments.values()) <= self.limits.starting_limit
        for book in self.actions.values():
            assert book.ends == (book.state not in ("waiting", "running"))

    def check_cores(self) -> set[tuple[str | None, int]]:
        """No core bears more than one grant. Return the cores that are held, with their nodes."""
        pods = {e.id: e for e in self.environments.values() if e.pod_core_ids}
        held = Counter((pod.node, core) for pod in pods.values() for core in pod.pod_core_ids)
        in_pods: Counter[tuple[str | None, int]] = Counter()
        for book in self.running().values():
            if book.action.kind == "cpu.open":
                continue
            pod = pods.get(book.action.environment or "")
            assert pod is None or set(book.grant.core_ids) <= set(pod.pod_core_ids)
            (held if pod is None else in_pods).update((book.grant.node, core) for core in book.grant.core_ids)
        assert max([*held.values(), *in_pods.values()], default=0) <= 1, "a core is granted twice"
        for node, core in held:
            assert node not in self.nodes or any(core in domain for domain in self.nodes[node].core_domains())
        return set(held)

    def held_by_job(self) -> dict[str, dict[str, float]]:
        """Return what the running actions of each job hold of the resources that fairness counts."""
        held: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        for book in self.running().values():
            of_job = held[book.action.job]
            of_job[CORES] += len(book.grant.core_ids)
            of_job[CELLS] += len(book.grant.cell_ids)
            for name in book.action.cost.quotas:
                of_job[f"quota:{name}"] += book.action.cost.least(f"quota:{name}")
        return {job: {name: amount for name, amount in of_job.items() if amount} for job, of_job in held.items()}

    def memory_held(self, node: str) -> int:
        of_environments = sum(e.memory_mb for e in self.environments.values() if e.node == node)
        running = [book for book in self.running().values() if book.grant.node == node and book.action.environment is None]
        return of_environments + sum(book.action.cost.least(MEMORY_MB) for book in running)
