"""What metrics cost: their CPU time per action, as a part of what an empty action costs the whole stack.

`python -m bench.metrics` measures two things in one run. An embedded stack without metrics runs bursts of empty actions; the CPU time of
its processes, Redis among them, is divided by the actions. Then what metrics do for an action is done many times over by itself: its
entries are counted as in the scheduler, a batch at a time, and its start and end as in a worker. Two stacks, one with metrics, would tell
the same by their difference, but on a machine that does other things that difference drowns. A scrape, which comes every few seconds, is
timed, too.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from itertools import islice
from statistics import median

import psutil
from prometheus_client import CollectorRegistry, generate_latest

from app.action_task import Call
from app.local import stack
from app.local.embedded import EmbeddedStack
from app.metrics.scheduler import SchedulerMetrics
from app.metrics.worker import WorkerMetrics
from bench.tools import running, used_s
from scheduler.live.entries import ActionEnded, ActionGranted, ActionReceived, Entry
from scheduler.model.commands import Finish
from tangram.action import Action, Cost
from tangram.client import Client
from tangram.settings import Settings

CORES, ENTRIES_AT_ONCE, JOBS = 32, 12, 50
MOST_FRACTION = 0.02
EMPTY = Action(kind="bench.empty", cost=Cost.of(cores=1))


def main() -> int:
    """Measure, print, and return 0 if metrics cost at most `MOST_FRACTION`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="bursts of the stack, and rounds of counting")
    parser.add_argument("--burst", type=int, default=2000, help="actions per burst")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    action_s = _stack_s(options.rounds, options.burst)
    scheduler_s, page_s, page_bytes = _scheduler_s(options.rounds)
    worker_s = _worker_s(options.rounds)
    part = (scheduler_s + worker_s) / action_s
    if options.json:
        figures = {"action_s": action_s, "scheduler_s": scheduler_s, "worker_s": worker_s, "part": part}
        print(json.dumps({**figures, "page_s": page_s, "page_bytes": page_bytes}, indent=2))
    else:
        print(f"an empty action, all processes:  {1e6 * action_s:7.0f} µs of CPU time")
        print(f"metrics of the scheduler:        {1e6 * scheduler_s:7.1f} µs")
        print(f"metrics of the worker:           {1e6 * worker_s:7.1f} µs")
        print(f"part of the action:              {part:7.2%}, target ≤ {MOST_FRACTION:.0%}")
        print(f"a scrape, {JOBS} jobs of 4 kinds:    {1e3 * page_s:7.1f} ms, {page_bytes // 1024} KiB")
    return 0 if part <= MOST_FRACTION else 1


def _stack_s(rounds: int, burst: int) -> float:
    """Return the CPU seconds that an empty action costs the processes of a stack."""
    plan = stack.StackPlan(cores=CORES, api_nodes=0, include=("bench.tasks",))
    with running(plan) as started, Client(job="bench", settings=stack.settings_of(started, Settings())) as client:
        found = []
        for number in range(rounds + 1):
            before = _cpu_s(started)
            for handle in [client.submit(EMPTY) for _ in range(burst)]:
                handle.result(timeout_s=300)
            if number:  # the first one warms up
                found.append((_cpu_s(started) - before) / burst)
    return median(found)


def _cpu_s(started: EmbeddedStack) -> float:
    return sum(used_s(psutil.Process(process.identity.pid)) for process in started._processes.values())


def _scheduler_s(rounds: int, actions: int = 20_000) -> tuple[float, float, int]:
    """Return the CPU seconds of counting one action's entries, those of a scrape, and its bytes."""
    registry = CollectorRegistry()
    metrics = SchedulerMetrics(registry, JOBS)
    found = []
    for number in range(rounds):
        entries = iter(list(_entries(number * actions, actions)))
        began = time.process_time()
        while batch := list(islice(entries, ENTRIES_AT_ONCE)):
            metrics.observe(batch, 0.001)
        found.append((time.process_time() - began) / actions)
    began = time.process_time()
    page = generate_latest(registry)
    return median(found), time.process_time() - began, len(page)


def _entries(first: int, actions: int) -> Iterator[Entry]:
    """Yield the entries of so many actions of several jobs and kinds, one after another."""
    now = time.time()
    for number in range(first, first + actions):
        name, job, kind = f"a{number}", f"job-{number % JOBS}", f"kind-{number % 4}"
        yield ActionReceived(id=name, header={"job": job, "kind": kind}, message="", submitted_at=now, received_at=now)
        yield ActionGranted(id=name, attempt=1, node="n", units=1, core_ids=(number % CORES,), cell_ids=(), granted_at=now)
        yield ActionEnded(at=now, end=_end(name))


def _end(name: str) -> Finish:
    parts = {"started_at": None, "queue_s": 0.01, "overhead_s": 0.002, "execution_s": 0.1, "cpu_s": 0.1, "dop": 1, "unit_s": 0.1}
    return Finish(id=name, status="succeeded", reason="", by_worker=True, **parts)  # type: ignore[arg-type]


def _worker_s(rounds: int, actions: int = 20_000) -> float:
    """Return the CPU seconds of counting one action in its worker."""
    metrics, found = WorkerMetrics(CollectorRegistry()), []
    call = Call(id="a", grant={}, header={}, started_at=0.0, began=0.0, execution_s=0.1, cpu_s=0.1)  # type: ignore[typeddict-item]
    for _ in range(rounds):
        began = time.process_time()
        for _ in range(actions):
            metrics.began("cpu.exec")
            metrics.ended("cpu.exec", call)
        found.append((time.process_time() - began) / actions)
    return median(found)


if __name__ == "__main__":
    sys.exit(main())
