"""What an action costs on top of a plain Celery task: round trip, throughput, CPU by process, and what it asks of Redis and SQL.

`python -m bench.overhead` starts an embedded stack and, beside it, a plain Celery worker on the same Redis. The subjects take turns:
what the machine does meanwhile hits all of them.

| subject  | what it is                                                                           |
|----------|--------------------------------------------------------------------------------------|
| `plain`  | an empty task of plain Celery, sent, run and waited for as in Celery's documentation   |
| `action` | an empty action: client, routing, scheduler, journal, worker with claim, result        |
| `echo`   | the command `echo` in an open environment                                              |

Both workers use the threads pool with as many threads. The node declares more cores than there are callers: what is measured is the system,
not the wait for cores. "Alone" is what is measured one at a time. Under load, `CALLERS` invocations at once are sent and waited for, again
and again. CPU time is that of all processes of a part and of those below them. A read by Redis' event loop counts as a round trip to Redis,
since a pipeline mostly arrives in one read; a push to a list counts as a message, and an `executemany` as one statement.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import psutil

from app.local import stack
from app.local.embedded import EmbeddedStack
from app.local.processes import Command
from bench import tasks
from tangram.action import Action, Cost
from tangram.client import Client
from tangram.connection import open_store
from tangram.settings import Settings

CORES, CALLERS = 32, 16
THREADS = 64 + 8 * CORES
WARM_UP, CONNECT_S, LONGEST_S = 50, 5.0, 120.0
MOST_RATIO, LEAST_THROUGHPUT = 3.0, 0.5
PARTS = ("client", "scheduler", "worker", "shells", "Redis")
COUNTS = ("trips to Redis", "commands of Redis", "messages", "statements")

Submit = Callable[[], Callable[[float], Any]]
"""Sends one invocation, and returns what waits for its result for so many seconds."""


def main() -> int:
    """Measure, print, and return 0 if both targets are met."""
    options = _arguments()
    with tempfile.TemporaryDirectory(prefix="tangram-bench-") as folder:
        statements, plan = Path(folder) / "statements", stack.StackPlan(cores=CORES, api_nodes=0, include=("bench.tasks",))
        scheduler, *others = stack.commands(plan)
        counting = Command("scheduler", (sys.executable, "-m", "bench.statements", str(statements)), scheduler.env)
        with EmbeddedStack(Path(folder), (counting, *others)) as started:
            argv = (sys.executable, "-m", "celery", "-A", "bench.tasks:plain", "worker", "-P", "threads", "-c", str(THREADS))
            started.spawn(Command("plain", (*argv, "-Q", tasks.PLAIN_QUEUE, "-l", "WARNING", "--without-gossip", "--without-mingle")))
            stack.wait_until_up(started, plan)
            settings = stack.settings_of(started, Settings())
            result = _measure(settings, options, lambda: _spent(started, statements))
    print(json.dumps(result, indent=2) if options.json else _text(result))
    plain, action = result["plain"], result["action"]
    met = action["trip_ms"] <= MOST_RATIO * plain["trip_ms"] and action["per_s"] >= LEAST_THROUGHPUT * plain["per_s"]
    return 0 if met else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="alternating rounds of each measurement")
    parser.add_argument("--trips", type=int, default=100, help="round trips per round")
    parser.add_argument("--burst", type=int, default=2000, help="invocations per round of throughput")
    parser.add_argument("--costs", type=int, default=800, help="invocations per round of costs")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser.parse_args()


def _measure(settings: Settings, options: argparse.Namespace, spent: Callable[[], Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Return the medians of each subject's figures over rounds, and the ranges of throughput."""
    tasks.plain.conf.update(broker_url=settings.broker_url, result_backend=settings.result_url)
    with Client(job="bench", settings=settings) as client:
        empty = Action(kind="bench.empty", cost=Cost.of(cores=1))
        environments = cycle([client.open() for _ in range(CALLERS)])
        submit: dict[str, Submit] = {
            "plain": lambda: tasks.empty_task.delay().get,
            "action": lambda: client.submit(empty).result,
            "echo": lambda: next(environments).submit("echo").result,
        }
        seen: dict[str, dict[str, list[float]]] = {subject: defaultdict(list) for subject in submit}
        for _ in range(options.rounds):
            for subject, send in submit.items():
                _run(send, WARM_UP)
                before = spent()
                seen[subject]["trip_ms"] += [1e3 * _run(send, 1) for _ in range(options.trips)]
                _note(seen[subject], before, spent(), options.trips, " alone")
        for _ in range(options.rounds):
            for subject, send in submit.items():
                before = spent()
                for _ in range(options.costs // CALLERS):
                    _run(send, CALLERS)
                _note(seen[subject], before, spent(), options.costs // CALLERS * CALLERS)
        for _ in range(options.rounds):
            for subject, send in submit.items():
                seen[subject]["per_s"].append(options.burst / _run(send, options.burst))
    return {subject: {name: median(values) for name, values in figures.items()} | _spread(figures) for subject, figures in seen.items()}


def _run(send: Submit, count: int) -> float:
    """Send so many invocations, wait for all, and return the seconds that it took."""
    began = time.perf_counter()
    for wait in [send() for _ in range(count)]:
        wait(LONGEST_S)
    return time.perf_counter() - began


def _note(figures: dict[str, list[float]], before: Mapping[str, float], after: Mapping[str, float], count: int, how: str = "") -> None:
    for name, value in after.items():
        figures[name + how].append((value - before[name]) / count)
    figures["CPU" + how].append(sum(after[part] - before[part] for part in PARTS) / count)


def _spread(figures: Mapping[str, list[float]]) -> dict[str, float]:
    low, _, high = quantiles(figures["trip_ms"], n=4)
    return {"trip_ms_p25": low, "trip_ms_p75": high, "per_s_min": min(figures["per_s"]), "per_s_max": max(figures["per_s"])}


def _spent(started: EmbeddedStack, statements: Path) -> dict[str, float]:
    """Return the CPU milliseconds of each part so far, and the counts."""
    spent = dict.fromkeys(PARTS, 0.0)
    spent["client"] = 1e3 * time.process_time()
    for process in started._processes.values():
        whole = psutil.Process(process.identity.pid)
        part = {"redis": "Redis", "scheduler": "scheduler"}.get(process.name, "worker")
        spent[part] += 1e3 * sum(whole.cpu_times()[:2])
        for below in whole.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                spent["shells"] += 1e3 * sum(below.cpu_times()[:4])
    with open_store(started.broker_url, CONNECT_S) as redis:
        stats, commands = redis.info("stats"), redis.info("commandstats")
    asked = (stats["total_reads_processed"], stats["total_commands_processed"], commands["cmdstat_lpush"]["calls"])
    return spent | dict(zip(COUNTS, (*asked, int.from_bytes(statements.read_bytes(), sys.byteorder)), strict=True))


def _text(found: Mapping[str, Mapping[str, float]]) -> str:
    plain, action = found["plain"], found["action"]
    rows = {
        "round trip, p50 (IQR), ms": [f"{f['trip_ms']:.2f} ({f['trip_ms_p25']:.2f}–{f['trip_ms_p75']:.2f})" for f in found.values()],
        "throughput (range), 1/s": [f"{f['per_s']:.0f} ({f['per_s_min']:.0f}–{f['per_s_max']:.0f})" for f in found.values()],
        **{f"{name} alone": [f"{f[f'{name} alone']:.1f}" for f in found.values()] for name in COUNTS},
        "CPU alone, ms": [f"{f['CPU alone']:.2f}" for f in found.values()],
        f"CPU, {CALLERS} at once, ms": [f"{f['CPU']:.2f}" for f in found.values()],
        **{f"  {part}": [f"{f[part]:.2f}" for f in found.values()] for part in PARTS},
    }
    lines = [f"{name:27}" + "".join(f"{value:>22}" for value in values) for name, values in {"": found, **rows}.items()]
    ratios = (action["trip_ms"] / plain["trip_ms"], MOST_RATIO, action["per_s"] / plain["per_s"], LEAST_THROUGHPUT)
    return "\n".join((*lines, "action ÷ plain: round trip {:.2f} (≤ {:g}), throughput {:.2f} (≥ {:g})".format(*ratios)))


if __name__ == "__main__":
    sys.exit(main())
