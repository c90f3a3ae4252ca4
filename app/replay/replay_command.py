"""Replays: one trace, one policy, in virtual time or live, to the same JSON document."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from redis import Redis
from sqlalchemy import Engine, select

from app.hosts import ANY
from app.journal.database import open_engine
from app.journal.models import Action as ActionRow
from app.journal.models import rows_of
from app.journal.runs import finish_run, start_run
from app.journal.status import status
from app.local import stack
from app.local.processes import wait_until
from app.preconditions import require_store
from app.replay.live_trainer import LiveReplay, LiveRun, with_journal
from app.replay.outside_api import API_HOST, OutsideApi
from app.replay.traces import limits_of
from app.scheduler_document import read_shown
from scheduler.learning.durations import Observation
from scheduler.model import UNLIMITED
from scheduler.model.copied import filled
from scheduler.policies import make_policy
from scheduler.sim.cluster import Cluster
from scheduler.sim.simulate import Simulation
from scheduler.sim.summary import Capacity, ReplayRecord, summarise
from scheduler.sim.trace import Trace, tile
from tangram.connection import find_addresses, open_store
from tangram.errors import StackUnreachable, TangramError
from tangram.settings import Settings

Begin = Callable[[int], Callable[[], None]]
"""Is told the number of actions; returns what is to be called after each."""

Progress = Callable[[str], AbstractContextManager[Begin]]
"""Shows under a title how far a replay is."""

MOST_IDS = 500
SETTLE_S = 10.0
"""Longest wait, after the last result, for the journal to have the last ends."""
NEXT_SHOWN_S = 3.0
"""Longest wait for a scheduler to show its figures again; it does so once a second."""
AGE_STEP_S = 0.001
"""The age of figures is known to a millisecond, by the result store; seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """The command line's words for a replay; sizes are per node, memory in MB, `None` for the machine's own.

    `overhead_s` is for simulations: what an action takes besides queueing, restoring and running.
    """

    policy: str = "elastic"
    nodes: int = 1
    cores: int | None = None
    gpus: int | None = None
    memory_mb: int | None = None
    gpu_memory_mb: int = 80_000
    seed: int = 0
    speed: float = 1.0
    tile: int | None = None
    spread_s: float = 60.0
    labels: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    overhead_s: float = 0.0

    def prepare(self, trace: Trace) -> Trace:
        """Return the trace as it is to be replayed."""
        return trace if self.tile is None else tile(trace, self.tile, self.spread_s, self.seed)


def simulate(trace: Trace, options: ReplayOptions, history: Sequence[Observation] = ()) -> ReplayRecord:
    """Replay in virtual time, by a scheduler that has learned from `history`."""
    prepared = options.prepare(trace)
    cores, memory_mb = options.cores or stack.cores_here(), options.memory_mb or UNLIMITED
    cluster = filled(Cluster, options, cores=cores, memory_mb=memory_mb, gpus=_gpus(prepared, options))
    policy = make_policy(options.policy, without=options.without)
    return Simulation(prepared, policy, cluster, speed=options.speed, history=history, overhead_s=options.overhead_s).run()


def _gpus(trace: Trace, options: ReplayOptions) -> int:
    """Return the GPUs per node: as told, else as many as the services' cells."""
    return options.gpus if options.gpus is not None else default_gpus(trace)


def default_gpus(trace: Trace) -> int:
    """Return the GPUs that one instance of each service takes at least."""
    return sum(max(1, service.cells[0]) for service in trace.services.values())


@dataclass(frozen=True, slots=True)
class LiveResult:
    """A live replay: its record and its JSON document."""

    record: ReplayRecord
    document: dict[str, Any]


def replay_live(
    trace: Trace,
    path: Path,
    options: ReplayOptions,
    settings: Settings,
    begin: Begin,
    say: Callable[[str], None],
) -> LiveResult:
    """Replay against the stack that the settings lead to, or against one that is started for it in the state folder.

    `say` gets lines for a person.
    """
    prepared = options.prepare(trace)
    make_policy(options.policy, without=options.without)
    with ExitStack() as exit_stack:
        target = exit_stack.enter_context(running_or_own(prepared, options, settings, say))
        outside = exit_stack.enter_context(OutsideApi())
        return _replay(prepared, path, options, target, outside.base_url, begin)


def _replay(
    trace: Trace,
    path: Path,
    options: ReplayOptions,
    target: Target,
    api_url: str,
    begin: Begin,
) -> LiveResult:
    settings, capacity = target.settings, target.capacity
    store = open_store(find_addresses(settings).result_url, settings.connect_timeout_s)
    engine = open_engine(settings.database_url or "")
    before = read_shown(store, settings.shards) or {}
    policy = str(before.get("policy", options.policy))
    chosen = {"nodes": options.nodes, "cores": capacity.cores, "speed": options.speed, "tile": options.tile, "seed": options.seed}
    jobs = sorted({trajectory.job for trajectory in trace.trajectories})
    run_id = start_run(engine, policy=policy, trace=str(path), jobs=jobs, options=chosen, started_at=time.time())
    count = sum(1 for _ in trace.actions())
    replay = LiveReplay(
        trace,
        settings,
        store,
        folder=path.resolve().parent,
        api_url=api_url,
        speed=options.speed,
        pretend=target.pretends,
        check=target.check,
        run_name=run_id,
        progress=begin(count),
        known_durations=make_policy(policy).rules.profiled,
    )
    live = replay.run()
    _wait_for_journal(engine, live)
    after = figures_after(store, settings.shards)
    record = ReplayRecord(
        policy=policy,
        trajectories=len(trace.trajectories),
        actions=with_journal(live, _journaled(engine, live)),
        first_arrival_s=live.first_arrival,
        last_result_s=live.last_result,
        capacity=capacity,
        resizes=int(after.get("resizes", 0)) - int(before.get("resizes", 0)),
        restores=int(after.get("restores", 0)) - int(before.get("restores", 0)),
        decisions=int(after.get("decisions", 0)) - int(before.get("decisions", 0)),
    )
    document = {
        **summarise(record),
        "decision_us_p50": float(after.get("decision_us_p50", 0.0)),
        "decision_us_p99": float(after.get("decision_us_p99", 0.0)),
        **{key: float(after[key]) for key in ("prediction_factor_p50", "prediction_factor_p90") if after.get("predictions")},
        "run": run_id,
        "database": settings.database_url,
    }
    finish_run(engine, run_id, summary=document, ended_at=time.time())
    return LiveResult(record, document)


@dataclass(frozen=True, slots=True)
class Target:
    """A stack to replay on; `pretends` says that its services are stubs made for the trace, `check` raises once it is broken."""

    settings: Settings
    capacity: Capacity
    pretends: bool = False
    check: Callable[[], None] = lambda: None


def alone(settings: Settings, folder: Path) -> Settings:
    """Return settings that lead to no stack that runs, so that a replay starts one of its own in `folder`."""
    return settings.model_copy(update={"broker_url": None, "result_url": None, "database_url": None, "state_dir": folder})


@contextmanager
def running_or_own(trace: Trace, options: ReplayOptions, settings: Settings, say: Callable[[str], None]) -> Iterator[Target]:
    """Give the stack that runs already, else one that lives as long as the context."""
    running = _running(settings)
    if running is not None:
        say("using the stack that runs already: its policy and its nodes, not those of the options")
        yield Target(running, _capacity(running))
        return
    with _own_stack(trace, options, settings) as own:
        yield own


def _running(settings: Settings) -> Settings | None:
    """Return settings for the stack that runs already; None where there is none."""
    try:
        addresses = find_addresses(settings)
    except StackUnreachable:
        if settings.broker_url or settings.result_url:
            raise
        return None
    try:
        require_store(open_store(addresses.result_url, settings.connect_timeout_s), addresses.result_url)
    except StackUnreachable:
        if settings.broker_url:
            raise
        return None
    database_url = settings.database_url
    if database_url is None and not settings.broker_url:
        database_url = json.loads(settings.stack_file.read_text())["database_url"]
    if database_url is None:
        raise StackUnreachable("TANGRAM_DATABASE_URL is not set: a live replay reads its run from the journal")
    urls = {"broker_url": addresses.broker_url, "result_url": addresses.result_url, "database_url": database_url}
    return settings.model_copy(update=urls)


@contextmanager
def _own_stack(trace: Trace, options: ReplayOptions, settings: Settings) -> Iterator[Target]:
    """Start a stack for this replay alone, with services that stand for those of the trace where none are declared."""
    cores, gpus = options.cores or stack.cores_here(), _gpus(trace, options)
    with tempfile.TemporaryDirectory(prefix="tangram-replay-") as folder:
        services_file = settings.services_file or _stand_ins(trace, Path(folder))
        plan = stack.StackPlan(
            policy=options.policy,
            nodes=options.nodes,
            cores=cores,
            memory_mb=options.memory_mb,
            gpu_nodes=options.nodes,
            cells=gpus,
            cell_memory_mb=options.gpu_memory_mb if settings.services_file is None else None,
            services_file=services_file,
            labels=",".join(options.labels),
            variables={"TANGRAM_WITHOUT": ",".join(options.without)} if options.without else {},
        )
        with stack.start(plan, settings.state_dir) as started:
            stack.wait_until_up(started, plan)
            capacity = Capacity(cores=options.nodes * cores, cells=options.nodes * gpus)
            yield Target(stack.settings_of(started, settings), capacity, pretends=settings.services_file is None, check=started.check)


def _stand_ins(trace: Trace, folder: Path) -> Path | None:
    """Write a services file in which every service of the trace is played by the stub engine."""
    if not trace.services and not trace.quotas:
        return None
    tasks = {action.service: "score" if action.kind == "gpu.score" else "logprobs" for action in trace.actions() if action.service}
    lines = []
    for name, service in trace.services.items():
        lines += [f"[services.{json.dumps(name)}]", 'engine = "stub"', f'task = "{tasks.get(name, "score")}"']
        lines += [f"cells = {list(service.cells)}", f"memory_mb = {max(1, service.memory_mb)}", f"restore_s = {service.restore_s}"]
        lines += [f"max_concurrency = {service.max_concurrency}"]
    path = folder / "services.toml"
    path.write_text("\n".join(lines) + "\n" + quotas_toml(trace), encoding="utf-8")
    return path


def quotas_toml(trace: Trace) -> str:
    """Return the quotas of a trace as tables of a services file; all of them may reach the API that the replay brings itself."""
    lines = []
    for name, quota in trace.quotas.items():
        quota = replace(quota, hosts=(*(quota.hosts or (ANY,)), API_HOST))
        lines += ["", f"[quotas.{json.dumps(name)}]"]
        lines += [f"{key} = {json.dumps(value)}" for key, value in limits_of(quota).items() if value is not None]
    return "\n".join([*lines, ""])


def _capacity(settings: Settings) -> Capacity:
    engine = open_engine(settings.database_url or "")
    nodes = [node for node in status(engine, time.time()).nodes if node.state == "up"]
    engine.dispose()
    cores, cells = (sum(int(node.description.get(kind, 0)) for node in nodes) for kind in ("cores", "cells"))
    return Capacity(cores=cores, cells=cells)


def figures_after(store: Redis, shards: int) -> dict[str, Any]:
    """Return figures that all schedulers showed after this call: those of their next housekeeping, else the last that they showed."""
    seen, called_at = dict[str, Any](), time.monotonic()

    def are_new() -> bool:
        asked_at = time.monotonic()
        seen.update(read_shown(store, shards) or {})
        return seen.get("running") == 0 and seen["shown_ago_s"] + AGE_STEP_S < asked_at - called_at

    wait_until(are_new, NEXT_SHOWN_S)
    return seen


def _journaled(engine: Engine, live: LiveRun) -> dict[str, ActionRow]:
    """Return what only the journal knows of the run's actions and of the opening of its environments."""
    ids = [*live.opened, *(record.task_id for record in live.records if record.task_id)]
    return {row.id: row for row in _rows_of(engine, ids)}


def _wait_for_journal(engine: Engine, live: LiveRun) -> None:
    """Wait until every action that has a result has its end in SQL as well."""
    ids = [record.task_id for record in live.records if record.task_id]
    if not wait_until(lambda: _unfinished(engine, ids) == 0, SETTLE_S):
        raise TangramError(f"{_unfinished(engine, ids)} actions have a result but no end in the journal")


def _unfinished(engine: Engine, ids: list[str]) -> int:
    return len(ids) - sum(row.ended_at is not None for row in _rows_of(engine, ids))


def _rows_of(engine: Engine, ids: list[str]) -> list[ActionRow]:
    """Return what the journal has of actions, in statements of `MOST_IDS` ids each."""
    query = select(ActionRow.id, ActionRow.queue_s, ActionRow.unit_s, ActionRow.ended_at)
    with engine.connect() as connection:
        chunks = (ids[start : start + MOST_IDS] for start in range(0, len(ids), MOST_IDS))
        return [row for chunk in chunks for row in rows_of(ActionRow, connection.execute(query.where(ActionRow.id.in_(chunk))))]
