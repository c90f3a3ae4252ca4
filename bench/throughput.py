"""How many commands a second schedulers grant, what CPU time a command takes of each process, and what the scheduler adds.

`python -m bench.throughput` starts Redis and the schedulers of `--shards` shards, one by default, and beside them a process that is
`--nodes` nodes of `CORES` cores. These nodes are stubs: they end each action at once, with its result, and nothing is run. This process is
the client. Two phases:

| phase | what                                                                                                               |
|-------|--------------------------------------------------------------------------------------------------------------------|
| full  | one command is always under way in each of `--environments`: commands a second, and CPU time by process            |
| paced | `--rate` commands a second are submitted: the time from a submission until its node has the grant, and its parts; CPU time  |

The journal is SQLite, or the empty database that `--database` names. The CPU time of a PostgreSQL server on this machine is that of all
processes of this name. On few cores all processes share them: commands a second then say what these cores carry together. One core of its
own would carry 1,000 ms by the scheduler's CPU time for a command.

To compare shards with one, give each of them in the paced phase the rate that one alone had. If a command then takes no more CPU time of
its scheduler and of the database, so many shards carry so many times as much.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import cycle
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
from redis import Redis

from app.broker.messages import reports_message
from app.local import stack
from app.local.embedded import EmbeddedStack
from bench.tools import Parser, process_of, used_s
from tangram.client import Client, Environment
from tangram.connection import open_store
from tangram.handles import Handle
from tangram.results import ExecResult
from tangram.settings import Settings
from tangram.wire import ACTION_HEADER, EVENTS_QUEUE, GRANT_HEADER, RESULT_KEY_PREFIX, WireGrant, node_queue, of_shard
from workers.start import describe

CORES, COMMAND = 64, "echo"
MOST_TAKEN, OPENERS = 256, 32
LONGEST_S = 60.0
STEP_S, WAIT_S = 0.005, 0.1
SHOWN_S = 1.0
KEPT_S = 600
Spent = Callable[[], dict[str, float]]
"""Returns the CPU milliseconds of each part so far."""
LEGS = ("", "to_", "in_", "from_")
"""The whole way of a grant, and its parts: to the scheduler's decision loop, in it, and from there to the node."""
CARRIED = ("scheduler", "database")
PARTS = ("scheduler", "database", "Redis", "client", "nodes")


def main() -> int:
    """Measure and print."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--database", metavar="URL", help="an empty PostgreSQL database for the journal; SQLite by default")
    parser.add_argument("--shards", type=int, default=1, help="schedulers that lead at once, each with a part of the nodes")
    parser.add_argument("--nodes", type=int, default=16, help="stub nodes")
    parser.add_argument("--environments", type=int, default=512, help="environments that are open on them")
    parser.add_argument("--rate", type=float, default=1000.0, help="commands a second of the paced phase")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long each round lasts")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each phase")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    found = measure(options)
    print(json.dumps(found, indent=2) if options.json else _text(found, options.rate))
    return 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of each round of both phases."""
    plan = stack.StackPlan(nodes=options.nodes, api_nodes=0, shards=options.shards)
    schedulers = stack.commands(plan)[: options.shards]
    with tempfile.TemporaryDirectory(prefix="tangram-throughput-") as folder:
        started = EmbeddedStack(Path(folder), schedulers)
        started.database_url = options.database or started.database_url
        with started, _nodes(started.broker_url, plan.node_names(), options.shards) as (stubs, told):
            stack.wait_until_up(started, plan)
            time.sleep(SHOWN_S)  # what shards carry is shown twice a second
            with Client(job="bench", settings=stack.settings_of(started, Settings(), options.shards)) as client:
                with ThreadPoolExecutor(OPENERS) as threads:
                    environments = list(threads.map(lambda _: client.open(), range(options.environments)))
                _keep_full(environments, options.seconds / 2)  # warms up
                schedulers_of = [command.name for command in schedulers]
                spent = partial(_spent_ms, started, schedulers_of, stubs)
                full = [_full(environments, options.seconds, spent) for _ in range(options.rounds)]
                paced = [_paced(environments, options, told, spent) for _ in range(options.rounds)]
    return {"full": full, "paced": paced}


def _full(environments: Sequence[Environment], seconds: float, spent: Spent) -> dict[str, float]:
    before, began = spent(), time.perf_counter()
    count = _keep_full(environments, seconds)
    return {"per_s": count / (time.perf_counter() - began), **_for_each(count, before, spent())}


def _for_each(count: int, before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {part: (after[part] - before[part]) / count for part in PARTS}


def _keep_full(environments: Sequence[Environment], seconds: float) -> int:
    """Keep one command under way in each environment for so many seconds; return how many have ended."""
    ends_at = time.perf_counter() + seconds
    under_way = deque((each, each.submit(COMMAND)) for each in environments)
    count = 0
    while under_way:
        environment, handle = under_way.popleft()
        handle.result(LONGEST_S)
        count += 1
        if time.perf_counter() < ends_at:
            under_way.append((environment, environment.submit(COMMAND)))
    return count


def _paced(environments: Sequence[Environment], options: argparse.Namespace, told: Connection, spent: Spent) -> dict[str, float]:
    """Submit at the rate; return the rate that was reached, CPU time, and percentiles of the time until a node has the grant, in ms."""
    _taken(told)
    before = spent()
    gc.disable()  # a walk over all handles would hold submissions up, and then let them go at once
    turns, under_way = cycle(environments), list[Handle[ExecResult]]()
    began = time.perf_counter()
    while (passed_s := time.perf_counter() - began) < options.seconds:
        due = int(passed_s * options.rate)
        under_way += [next(turns).submit(COMMAND) for _ in range(due - len(under_way))]
        time.sleep(STEP_S)
    submitted_s = time.perf_counter() - began
    gc.enable()
    for handle in under_way:
        handle.result(LONGEST_S)
    figures = {"per_s": len(under_way) / submitted_s, **_for_each(len(under_way), before, spent())}
    for name, seconds in zip(LEGS, zip(*_taken(told), strict=True), strict=True):
        ordered = sorted(seconds)
        figures |= {f"{name}p{part}_ms": 1e3 * ordered[len(ordered) * part // 100] for part in (50, 99)}
    return figures


def _spent_ms(started: EmbeddedStack, schedulers: Sequence[str], stubs: int) -> dict[str, float]:
    """Return the CPU milliseconds of each part so far."""
    servers = [each for each in psutil.process_iter(["name"]) if each.info["name"] == "postgres"]
    parts = {
        "scheduler": [process_of(started, name) for name in schedulers],
        "database": servers if started.database_url.startswith("postgresql") else [],
        "Redis": [process_of(started, "redis")],
        "client": [psutil.Process()],
        "nodes": [psutil.Process(stubs)],
    }
    spent = dict.fromkeys(PARTS, 0.0)
    for part, processes in parts.items():
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                spent[part] += 1e3 * used_s(process)
    return spent


# -- the stub nodes ------------------------------------------------------------------------------------------------------


@contextmanager
def _nodes(url: str, names: list[str], shards: int) -> Iterator[tuple[int, Connection]]:
    """Run the stub nodes; give their process id, and the end of a pipe that is asked for what each grant took to come."""
    here, there = multiprocessing.Pipe()
    spawning = multiprocessing.get_context("spawn")
    process = spawning.Process(target=_serve, args=(url, names, shards, there), daemon=True)
    process.start()
    assert process.pid is not None
    with closing(here):
        yield process.pid, here
    process.join(LONGEST_S)


def _taken(told: Connection) -> list[tuple[float, ...]]:
    """Return the seconds of each of `LEGS` of all actions that have come to the nodes since this was asked last."""
    told.send("times")
    times: list[tuple[float, ...]] = told.recv()
    return times


def _serve(url: str, names: list[str], shards: int, told: Connection) -> None:
    """Be the nodes, until the other end of the pipe is closed."""
    nodes = _StubNodes(open_store(url, LONGEST_S), names, shards)
    with suppress(EOFError):
        while True:
            if told.poll():
                told.recv()
                told.send(nodes.times)
                nodes.times = []
            nodes.step()


class _StubNodes:
    """Nodes that end each action at once; `times` are the seconds of `LEGS` of those that have come."""

    def __init__(self, redis: Redis, names: list[str], shards: int) -> None:
        self._redis = redis
        self._events = {name: of_shard(EVENTS_QUEUE, number % shards) for number, name in enumerate(names)}
        self._queues = {node_queue(name): name for name in names}
        self._nodes = {name: _description(name) for name in names}  # made once: grants wait while a beat is made
        self._beat_s = Settings().beat_s
        self._beat_at = time.monotonic() + self._beat_s
        self.times: list[tuple[float, ...]] = []
        self._report("joined")

    def step(self) -> None:
        """End the actions that have come, after waiting a moment for the first."""
        if time.monotonic() >= self._beat_at:
            self._beat_at = time.monotonic() + self._beat_s
            self._report("beat")
        came: Any = self._redis.brpop([*self._queues], timeout=WAIT_S)
        if came is not None:
            more: Any = self._redis.rpop(came[0], MOST_TAKEN)
            self._end(self._queues[came[0].decode()], [came[1], *(more or ())])

    def _report(self, kind: str) -> None:
        for name, node in self._nodes.items():
            self._redis.lpush(self._events[name], reports_message([{"type": kind, "node": node}]))

    def _end(self, name: str, messages: list[bytes]) -> None:
        """End the actions of messages: store and publish their results, and report."""
        now, reports = time.time(), []
        with self._redis.pipeline(transaction=False) as pipe:
            for message in messages:
                headers = json.loads(message)["headers"]
                if (grant := headers.get(GRANT_HEADER)) is None:
                    continue  # nothing runs here that could be changed
                if headers["task"] == "cpu.open":
                    self._nodes[name]["environments"].append(headers[ACTION_HEADER]["environment"])
                at = grant["submitted_at"], grant["received_at"], grant["granted_at"], now
                self.times.append((now - at[0], at[1] - at[0], at[2] - at[1], now - at[2]))
                key, result = RESULT_KEY_PREFIX + headers["id"], _result(headers["id"], headers["task"], grant, now)
                pipe.set(key, result, ex=KEPT_S)
                pipe.publish(key, result)
                reports.append(_finished(headers["id"], grant["attempt"], now))
            if reports:
                pipe.lpush(self._events[name], reports_message(reports))
            pipe.execute()


def _result(action_id: str, task: str, grant: WireGrant, now: float) -> str:
    queue_s = grant["granted_at"] - grant["received_at"]
    value = {"exit_code": 0, "stdout": "", "stderr": "", "truncated": False, "cpu_s": 0.0, "max_rss_mb": 0.0}
    act = {"queue_s": queue_s, "background_s": 0.0, "overhead_s": now - grant["submitted_at"] - queue_s, "execution_s": 0.0}
    payload = {"status": "succeeded", "value": value, "reason": "", "cause": "", "dop": grant["units"], "act": act}
    return json.dumps({"status": "SUCCESS", "result": payload, "traceback": None, "children": [], "task_id": action_id})


def _finished(action_id: str, attempt: int, now: float) -> dict[str, Any]:
    times = {"started_at": now, "execution_s": 0.0, "waited_s": 0.0, "slept_s": 0.0, "cpu_s": 0.0}
    return {"type": "finished", "id": action_id, "attempt": attempt, "status": "succeeded", "reason": "", "cause": "", **times}


def _description(name: str) -> dict[str, Any]:
    offers = {"cores": CORES, "domains": [list(range(CORES))], "memory_mb": 1 << 20, "incarnation": name, "environments": []}
    return dict(describe("cpu", Settings(node_name=name), **offers))


def _text(found: dict[str, Any], rate: float) -> str:
    lines = [f"{'full':8}{'commands/s':>12}" + "".join(f"{part + ', ms':>16}" for part in PARTS)]
    lines += [
        f"{number:<8}{row['per_s']:12.0f}" + "".join(f"{row[part]:16.3f}" for part in PARTS) for number, row in enumerate(found["full"], 1)
    ]
    names = [f"{name}p{part}_ms" for name in LEGS for part in (50, 99)]
    heads = [*(f"{part}, ms" for part in CARRIED), *names]
    lines += ["", f"{f'{rate:g}/s':8}{'commands/s':>12}" + "".join(f"{head:>15}" for head in heads)]
    for number, row in enumerate(found["paced"], 1):
        figures = [f"{row[part]:15.3f}" for part in CARRIED] + [f"{row[name]:15.1f}" for name in names]
        lines.append(f"{number:<8}{row['per_s']:12.0f}" + "".join(figures))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
