"""Runs a scenario in virtual time and says which laws it broke."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import anyio
from billiard import einfo
from celery import Celery
from kombu.utils import functional
from sqlalchemy import Engine

from app.broker.memory import use
from app.broker.transport import KombuTransport
from app.celery import configuration
from app.journal import unfinished
from app.journal.database import DatabaseError
from app.journal.leader import SCHEDULER_LEASE
from app.preconditions import require_broker
from app.scheduler_process import Scheduler, transport_of
from scheduler.learning import holdings
from scheduler.live.entries import Journal
from tangram import clock
from tangram.errors import StackUnreachable
from tangram.settings import Settings
from tangram.wire import of_shard
from tests.virtual import laws
from tests.virtual.api_node import VirtualApiNode
from tests.virtual.clock import Process, World
from tests.virtual.gpu import VirtualGpuNode
from tests.virtual.network import SLOW_S, Network, VirtualJournal, VirtualLease, open_journal
from tests.virtual.node import APP, VirtualNode
from tests.virtual.sandbox import Ledger
from tests.virtual.scenario import Fault, Scenario
from tests.virtual.trainer import Operator, Rollout, Step, Trainer
from workers.cpu.memory import allowance

SCHEDULERS = 2
"""Schedulers of each shard."""
LOOK_S = 0.2
"""How often a supervisor looks whether a scheduler has ended."""

ENDS_S = 900.0
"""Within which all rollouts have ended after the last fault is over: the longest of the docs' bounds, one after the other."""

NODE_LOST_S = 10.0
"""Silence after which a node is lost: some faults last for longer, and some do not."""

QUIET_S = 240.0
"""Within which nothing is left anywhere after that: leases of clients that are gone, blobs, claims."""


@dataclass
class Accounts:
    """What actions have held by the journal, in unit-seconds."""

    unit_s: dict[str, float] = field(default_factory=dict)
    _holding: dict[str, int] = field(default_factory=dict)
    _since: float = 0.0

    def note(self, now: float, holding: dict[str, int]) -> None:
        """Take in how many units each action holds from now on."""
        for action, units in self._holding.items():
            self.unit_s[action] = self.unit_s.get(action, 0.0) + units * (now - self._since)
        self._holding, self._since = holding, now


@dataclass
class Run:
    """One run of a scenario."""

    scenario: Scenario
    world: World
    network: Network
    database: sqlite3.Connection
    engine: Engine
    ledger: Ledger
    settings: Settings
    nodes: list[VirtualNode] = field(default_factory=list)
    trainers: list[Trainer] = field(default_factory=list)
    schedulers: list[Process] = field(default_factory=list)
    leaders: dict[int, Process] = field(default_factory=dict)
    """Which scheduler has come to lead last, by shard."""
    accounts: Accounts = field(default_factory=Accounts)
    harmed: set[int] = field(default_factory=set)
    """The shards that a fault may have touched."""
    broken: list[str] = field(default_factory=list)
    shared: dict[tuple[str, str, str], float] = field(default_factory=dict)
    """The commands that hold a core together, and since when."""
    draining: set[str] = field(default_factory=set)
    """The nodes that were draining at the last write."""
    granted: set[tuple[str, int]] = field(default_factory=set)
    """The tries of actions that were granted then."""
    shown: list[tuple[int, object]] = field(default_factory=list)
    """What schedulers have shown last, by shard: epochs and jobs."""
    shown_at: float = 0.0
    """Since when they show it."""
    log: list[str] = field(default_factory=list)

    def note(self, what: str) -> None:
        """Add to the log of what happened."""
        self.log.append(f"{self.world.now:9.4f} {what}")

    def go(self) -> list[str]:
        """Run to the end; return the laws that were broken."""
        scenario, world = self.scenario, self.world
        for number in range(SCHEDULERS * scenario.shards):
            self.schedulers.append(self._scheduler(number))
        for number, cores in enumerate(scenario.cores):
            settings = self._settings_of(number % scenario.shards)
            node = VirtualNode(self.network, self.ledger, settings, f"n{number}", cores, scenario.memory_mb)
            self.nodes.append(node)
            node.start()
        for number, cells in enumerate(scenario.cells):
            node = VirtualGpuNode(self.network, self.ledger, self.settings, f"g{number}", cells)
            self.nodes.append(node)
            node.start()
        for number in range(scenario.apis):
            node = VirtualApiNode(self.network, self.ledger, self.settings, f"a{number}", 0)
            self.nodes.append(node)
            node.start()
        for job in sorted({rollout.job for rollout in scenario.rollouts}):
            trainer = Trainer(self.network, self.settings, job)
            self.trainers.append(trainer)
            trainer.start([rollout for rollout in scenario.rollouts if rollout.job == job])
        for fault in scenario.faults:
            world.later(fault.at_s, partial(self._inflict, fault))
        operator = Operator(self.network, self.settings, "operator", is_noted=self._is_noted)
        drains = [(self.nodes[number % len(self.nodes)].name, at_s, lasts_s) for number, at_s, lasts_s in scenario.drains]
        operator.start([Rollout(name, "operator", at_s, (Step(0.0, "drain"), Step(lasts_s, "undo"))) for name, at_s, lasts_s in drains])
        last_s = scenario.calm_from_s
        self._supervise()
        self._until(lambda: world.now > last_s and all(map(_is_over, (*self.trainers, operator))), last_s + ENDS_S)
        if not self.broken:
            self._until(lambda: not laws.left(self), QUIET_S)
            self.broken += laws.at_the_end(self)
        return self.broken

    def _until(self, condition: laws.Condition, limit_s: float) -> None:
        world, network, checked_at, written = self.world, self.network, 0.0, -1

        def over() -> bool:
            nonlocal checked_at, written
            if world.failures:
                self.broken += laws.at_once(self)
            if written != network.written:
                written = network.written
                self.broken += laws.after_a_write(self)
            if world.now - checked_at < 1.0:
                return bool(self.broken)
            checked_at = world.now
            self.broken += laws.now_and_then(self)
            return bool(self.broken) or condition()

        world.run_until(over, limit_s)

    def _is_noted(self, node: str, draining: bool) -> bool:
        """Say whether the journal has a node as draining, or not draining."""
        return self.database.execute("select draining from nodes where name = ?", (node,)).fetchall() == [(draining,)]

    # Schedulers

    def _settings_of(self, shard: int) -> Settings:
        return self.settings.model_copy(update={"shard": shard})

    def _shard_of(self, scheduler: Process) -> int:
        return self.schedulers.index(scheduler) % self.scenario.shards

    def leaders_now(self) -> list[Process]:
        """Return those schedulers that have come to lead last and have not been started again since, by shard."""
        return [process for _, process in sorted(self.leaders.items()) if process in self.schedulers]

    def _scheduler(self, number: int) -> Process:
        process = Process(self.world, f"scheduler {number}")
        process.run(partial(self._schedule, process, number % self.scenario.shards), "scheduler")
        return process

    def _schedule(self, process: Process, shard: int) -> None:
        settings, name = self._settings_of(shard), of_shard(SCHEDULER_LEASE, shard)
        if self.scenario.standby and process.name.endswith(" 1"):
            settings = settings.model_copy(update={"policy": self.scenario.standby, "without": ()})
        lease = VirtualLease(self.engine, name, f"{process.name} {len(self.log)} {self.world.now}", settings.takeover_s, patient=True)
        lease.network = self.network
        app = Celery("tangram", set_as_current=False)
        app.conf.update(configuration(settings))
        use(app, self.network.broker)
        app.conf.result_backend_transport_options = {"retry_policy": {"max_retries": 0}}

        def connect(epoch: int) -> KombuTransport:
            self.note(f"{process.name} leads, epoch {epoch}")
            self.leaders[shard] = process
            return transport_of(settings, app, epoch)

        def watch(journal: Journal, epoch: int) -> Journal:
            return VirtualJournal(journal, self.network)

        try:
            reach = partial(require_broker, app, settings.connect_timeout_s)
            Scheduler(settings, self.engine, lease, connect, reach, watch).run(clock.event())
        except (DatabaseError, StackUnreachable) as error:
            self.note(f"{process.name} ends: {error}")
        except Exception as error:
            self.broken.append(f"a scheduler failed: {type(error).__name__}: {error}: {error.__cause__!r}")
        process.kill()

    def _supervise(self) -> None:
        for number, process in enumerate(self.schedulers):
            if not process.alive:
                self.note(f"{process.name} is started again")
                self.schedulers[number] = self._scheduler(number)
        self.world.later(LOOK_S, self._supervise)

    # Faults

    def _inflict(self, fault: Fault) -> None:
        self.note(f"FAULT {fault}")
        what, _, whom = fault.kind.partition(" ")
        world, network = self.world, self.network
        if whom in ("node", "scheduler", "trainer"):
            self._harm(what, whom, fault)
            return
        self.harmed.update(range(self.scenario.shards))
        put = partial(self._put, fault.lasts_s)
        match fault.kind:
            case "broker away":
                put(network, "broker_away", True, False)
                network.broker.restart(keeps=True)
            case "error replies":
                put(network, "answers_errors", int(fault.amount > 0), None)
            case "submissions lost":
                put(network.broker, "loses_submissions", True, False)
            case "broker restarts":
                network.broker.restart(keeps=True)
            case "broker comes back empty":
                network.broker.restart(keeps=False)
            case "journal away":
                put(network, "journal_away", True, False)
            case "answers lost":
                put(network, "loses_answers", min(0.5, abs(fault.amount)), 0.0)
            case "slow network":
                put(network, "slow_s", 0.15, SLOW_S)
            case "clock steps":
                everyone = [*self.schedulers, *(node.process for node in self.nodes), *(trainer.process for trainer in self.trainers)]
                process = everyone[fault.target % len(everyone)]
                if process is not None:
                    process.offset_s += fault.amount
            case _:
                word = fault.kind.removeprefix("messages ")
                network.broker.faults[word] = min(0.3, abs(fault.amount))
                world.later(fault.lasts_s, lambda: network.broker.faults.pop(word, None))

    def _note_harm(self, victim: VirtualNode | Trainer | Process) -> None:
        """Note which shards a fault of one of these may touch: its own, or all if it is a trainer."""
        if isinstance(victim, Trainer):
            self.harmed.update(range(self.scenario.shards))
        else:
            self.harmed.add(self._shard_of(victim) if isinstance(victim, Process) else victim.settings.shard)

    def _put(self, lasts_s: float, what: object, name: str, value: object, usual: object) -> None:
        """Give an attribute another value for some seconds."""
        setattr(what, name, value)
        self.world.later(lasts_s, lambda: setattr(what, name, usual))

    def _harm(self, what: str, whom: str, fault: Fault) -> None:
        some: list[VirtualNode] | list[Trainer] | list[Process]
        leaders = self.leaders_now()
        schedulers = sorted(self.schedulers, key=lambda one: (one not in leaders, self._shard_of(one)))
        some = {"node": self.nodes, "trainer": self.trainers, "scheduler": schedulers}[whom]
        if not some:
            return
        victim = some[fault.target % len(some)]
        process = victim if isinstance(victim, Process) else victim.process
        if process is None or not process.alive or process.frozen:
            return
        self._note_harm(victim)
        if what == "move":
            assert isinstance(victim, VirtualNode)
            victim.settings = self._settings_of((victim.settings.shard + 1) % self.scenario.shards)
            self._note_harm(victim)
        if what == "freeze" and whom == "scheduler" and fault.amount > 0:
            self.network.freeze_before_sending[process.name] = fault.lasts_s
        elif what == "freeze":
            process.freeze()
            self.world.later(fault.lasts_s, process.thaw)
        elif what == "sicken":
            assert isinstance(victim, VirtualNode)
            self._put(fault.lasts_s, victim, "is_sick", True, False)
        elif what == "cut":
            self.network.cut[process.name] = "silent" if fault.amount > 0 else "refused"
            self.world.later(fault.lasts_s, lambda: self.network.cut.pop(process.name, None))
        elif isinstance(victim, Process):
            self.network.kill_at[process.name] = max(1, int(fault.amount))
        elif isinstance(victim, Trainer):
            victim.kill()
        else:
            victim.stop(hands_over=what == "replace") if what in ("stop", "replace") else victim.kill()
            self.world.later(max(2.0, fault.lasts_s), partial(_start_again, victim, adopts=what in ("restart", "replace")))


def _start_again(node: VirtualNode, *, adopts: bool) -> None:
    assert node.process is not None
    if node.process.alive:
        node.kill()
    node.start(adopts=adopts)


def _is_over(trainer: Trainer) -> bool:
    return trainer.closed or trainer.process is None or not trainer.process.alive


async def _sleep(seconds: float) -> None:
    clock.sleep(seconds)


@cache
def _settings() -> Settings:
    return Settings(
        _env_file=None,  # type: ignore[call-arg]
        state_dir=Path("/nonexistent"),
        services_file=Path(__file__).parent / "quotas.toml",
        orphan_s=30.0,
        keep_days="forever",
        takeover_s=5.0,
        node_lost_s=NODE_LOST_S,
        open_timeout_s=60.0,
    )


@contextmanager
def running(scenario: Scenario, event_log: Path | None = None) -> Iterator[Run]:
    """Prepare the run of a scenario, whose schedulers may keep an event log, and clear up after it."""
    world = World(scenario.seed, scenario.starved)
    network = Network(world)
    database, engine = open_journal()
    # The workers' application is one in a process: other tests of this process use it with a broker of theirs.
    reached = {name: getattr(APP.conf, name) for name in ("broker_url", "broker_transport_options")}
    random.seed(scenario.seed)
    hexes = random.Random(f"hex {scenario.seed}")
    settings = _settings().model_copy(
        update={
            "event_log": event_log,
            "outage_s": scenario.outage_s,
            "breaker_least": scenario.breaker_least,
            "shards": scenario.shards,
            "starting_limit": scenario.starting_limit,
            "queue_limit": scenario.queue_limit,
            "starts_per_s": scenario.starts_per_s,
            "environments_max": scenario.environments_max,
            "policy": scenario.policy,
            "without": scenario.without,
        }
    )
    run = Run(scenario, world, network, database, engine, Ledger(), settings)
    logging.disable()  # laws say what is wrong, and to format thousands of outages takes a seventh of the time
    with (
        clock.installed(world),
        patch.object(APP, "_backend_cache", None),
        patch.object(secrets, "token_hex", lambda size=16: hexes.randbytes(size).hex()),
        # A scheduler that takes over remembers no ends, so that it has to ask the journal.
        patch.object(unfinished, "ENDS_LOADED", 0),
        # One environment tells what the next ones hold. Else the limits of the few that a scenario has would all fit, and none wait.
        patch.object(holdings, "KNOWN", 1),
        # Where kombu waits between two tries to connect.
        patch.object(functional, "sleep", clock.sleep),
        patch.object(functional, "time", clock.monotonic),
        # The exchange of an API node is no coroutine that waits, but a thread.
        patch.object(asyncio, "sleep", _sleep),
        patch.object(anyio, "fail_after", lambda _: nullcontext()),
        patch.object(allowance, "time", SimpleNamespace(monotonic=clock.monotonic)),
        # Celery's tracer copies tracebacks, for the parents of its processes: a tenth of the time, and nobody reads them here.
        patch.object(einfo, "Traceback", lambda traceback: None),
        patch.object(einfo, "traceback", SimpleNamespace(format_exception=lambda *_: ())),
    ):
        use(APP, network.broker)
        try:
            yield run
        finally:
            APP.conf.update(reached)
            for trainer in run.trainers:
                if trainer.session is not None:
                    trainer.session._finalizer.detach()
            world.close()
            logging.disable(logging.NOTSET)


def broken_laws(scenario: Scenario) -> list[str]:
    """Run a scenario; return the laws that were broken, in words."""
    with running(scenario) as run:
        return run.go()
