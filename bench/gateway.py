"""What the gateway adds to a call under load, and that it keeps nothing: E2B's and SWE-ReX's clients against the native one, in one run.

`python -m bench.gateway` starts an embedded stack with a gateway. Each client opens 200 environments at once (`--environments`) and runs
empty commands in them. The native client runs the same shell lines; its rounds alternate with those of the others, so that what the machine
does meanwhile hits both. There are three loads:

| load | what |
|---|---|
| `alone` | one caller, one call after another |
| `paced` | calls begin at `--rate` per second, spread over all environments, as from rollouts that think between their calls |
| `crowd` | a caller for each environment, none of which pauses: `--calls` in all. Latency is then how long the queues are |

`added` is the difference of the medians. `CPU` is the gateway's CPU time per call, which says more than latency where others use the
machine. Client and stack share the machine, so the client's own work is in every figure. The lag of the gateway's event loop is over all
loads.

Counts are taken after a warm-up and again after all calls, with the same environments open. Results stay in Redis for an hour and expire,
so keys that do not expire are what a leak would show. Beside it the server that SWE-ReX brings is measured with the same client.

The exit code is 0 only if the targets are met: `added` at most 5 ms at the load `paced`, the lag's 99th percentile below 50 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import psutil
from redis import Redis
from sqlalchemy import Engine

from app.gateway.tokens import make_token
from app.journal.database import open_engine
from app.local import stack
from bench.gateway_callers import E2b, Native, Reference, Rex, Way, new_names
from bench.gateway_counts import Counts, Lags
from bench.gateway_table import text
from bench.tools import free_port, process_of, running, used_s
from tangram import AsyncClient
from tangram.connection import open_store
from tangram.settings import Settings

CORES, MEMORY_MB = 8, 65536
BEATS = {"TANGRAM_BEAT_S": "5", "TANGRAM_TAKEOVER_S": "30"}
"""A machine that is all used up must not lose its node for that."""
MOST_ADDED_MS, MOST_LAG_MS = 5.0, 50.0
WARM_UP = 3
JOURNALED_S = 10.0
REFERENCE_CALLS, REFERENCE_SESSIONS = 20, 10
MS = 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One client beside the native one at one load; milliseconds, calls per second."""

    client: str
    load: str
    calls: int
    p50_ms: float
    p99_ms: float
    native_p50_ms: float
    native_p99_ms: float
    added_ms: float
    per_s: float
    native_per_s: float
    gateway_cpu_ms: float


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and return 0 if the targets are met."""
    options = _parser().parse_args(arguments)
    plan = stack.StackPlan(cores=CORES, memory_mb=MEMORY_MB, api_nodes=0, gateway_port=free_port(), variables=BEATS)
    with running(plan) as started, redirect_stdout(sys.stderr):  # SWE-ReX's client prints
        document = asyncio.run(_measure(started, plan.gateway_url, options))
    print(json.dumps(document, indent=2) if options.json else text(document))
    return 0 if document["met"] else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.gateway", description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--environments", type=int, default=200, help="environments of each client, all open at once")
    parser.add_argument("--calls", type=int, default=4000, help="calls through the gateway without pauses, half of them with each client")
    parser.add_argument("--rounds", type=int, default=3, help="alternating rounds of each load")
    parser.add_argument("--rate", type=float, default=15.0, help="calls per second of the load `paced`")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of a round of the load `paced`")
    parser.add_argument("--alone", type=int, default=40, help="calls of a round of the load `alone`")
    parser.add_argument("--clients", default="e2b,swerex", help="which clients, with commas")
    parser.add_argument("--no-reference", action="store_true", help="leave the server of SWE-ReX out")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


async def _measure(started: Any, url: str, options: argparse.Namespace) -> dict[str, Any]:
    settings, engine = stack.settings_of(started, Settings()), open_engine(started.database_url)
    store = open_store(started.result_url, settings.connect_timeout_s)
    token, lags = make_token(engine, "bench"), Lags(url)
    names, processes = new_names(), {name: process_of(started, name) for name in ("gateway", "scheduler", "cpu-0")}
    load_before = os.getloadavg()[0]
    async with AsyncClient(job="native", settings=settings) as client:
        native = Native(options.environments, client)
        chosen: list[Way] = []
        if "e2b" in options.clients:
            chosen.append(E2b(options.environments, url, token))
        if "swerex" in options.clients:
            chosen.append(Rex(options.environments, lambda number: f"{url}/envs/{names(number)}", token))
        await lags.start()
        for way in (native, *chosen):
            _say(f"{way.name}: opening {way.environments} environments")
            await way.open()
        for way in (native, *chosen):
            await _crowd(way, WARM_UP * way.environments)
        before = await asyncio.to_thread(Counts.of, processes, store, engine)
        compared = [row for way in chosen for row in await _compare(way, native, processes["gateway"], options, len(chosen))]
        lag_ms = await lags.p99_s() * MS
        after = await asyncio.to_thread(Counts.of, processes, store, engine)
        for way in (native, *chosen):
            await way.close()
        closed = await asyncio.to_thread(_after_closing, processes, store, engine)
    reference = None if options.no_reference else await _reference(Path(started.state_dir))
    engine.dispose()
    paced = [row for row in compared if row.load == "paced"]
    return {
        "environments": options.environments,
        "rate_per_s": options.rate,
        "cores": os.cpu_count(),
        "machine_load": [load_before, os.getloadavg()[0]],
        "creates_per_s": {way.name: way.created_per_s for way in (native, *chosen)},
        "compared": [asdict(row) for row in compared],
        "loop_lag_p99_ms": lag_ms,
        "counts": {"before": before.as_dict(), "after": after.as_dict(), "closed": closed.as_dict()},
        "reference": reference,
        "targets": {"added_ms": MOST_ADDED_MS, "loop_lag_p99_ms": MOST_LAG_MS},
        "met": lag_ms < MOST_LAG_MS and all(row.added_ms <= MOST_ADDED_MS for row in paced),
    }


def _after_closing(processes: dict[str, psutil.Process], store: Redis, engine: Engine) -> Counts:
    """Return what is held once the journal knows that all environments are closed, or has not learned it in time."""
    deadline = time.monotonic() + JOURNALED_S
    while (counts := Counts.of(processes, store, engine)).environments and time.monotonic() < deadline:
        time.sleep(0.1)
    return counts


async def _compare(way: Way, native: Native, gateway: psutil.Process, options: argparse.Namespace, ways: int) -> list[Compared]:
    """Measure a client and its native twin under all loads, in alternating rounds."""
    each = max(1, options.calls // ways // options.rounds)
    loads: dict[str, Callable[[Way], Awaitable[list[float]]]] = {
        "alone": lambda one: _alone(one, options.alone),
        "paced": lambda one: _paced(one, options.rate, options.seconds),
        "crowd": lambda one: _crowd(one, each),
    }
    native.line = way.line
    found = []
    for load, measure in loads.items():
        times: dict[str, list[float]] = {native.name: [], way.name: []}
        spent = {native.name: 0.0, way.name: 0.0}
        cpu_s = 0.0
        for turn in range(options.rounds):
            for one in (native, way) if turn % 2 == 0 else (way, native):
                used, began = used_s(gateway), time.perf_counter()
                times[one.name] += await measure(one)
                spent[one.name] += time.perf_counter() - began
                cpu_s += used_s(gateway) - used if one is way else 0.0
        row = _compared(way.name, load, times[way.name], times[native.name], spent[way.name], spent[native.name], cpu_s)
        _say(f"{way.name}, {load}: {row.p50_ms:.1f} ms, native {row.native_p50_ms:.1f} ms, CPU {row.gateway_cpu_ms:.2f} ms a call")
        found.append(row)
    return found


def _compared(client: str, load: str, times: list[float], native: list[float], spent_s: float, native_s: float, cpu_s: float) -> Compared:
    p50, native_p50 = median(times) * MS, median(native) * MS
    return Compared(
        client=client,
        load=load,
        calls=len(times),
        p50_ms=p50,
        p99_ms=_p99(times) * MS,
        native_p50_ms=native_p50,
        native_p99_ms=_p99(native) * MS,
        added_ms=p50 - native_p50,
        per_s=len(times) / spent_s,
        native_per_s=len(native) / native_s,
        gateway_cpu_ms=cpu_s / len(times) * MS,
    )


async def _alone(way: Way, calls: int) -> list[float]:
    return [await _timed(way, number % way.environments) for number in range(calls)]


async def _paced(way: Way, rate: float, seconds: float) -> list[float]:
    """Begin calls at a rate, each in an environment that is free; one that finds none waits for it, which counts."""
    free: asyncio.Queue[int] = asyncio.Queue()
    for number in range(way.environments):
        free.put_nowait(number)

    async def one() -> float:
        began = time.perf_counter()
        number = await free.get()
        try:
            await way.call(number)
        finally:
            free.put_nowait(number)
        return time.perf_counter() - began

    began, tasks = time.perf_counter(), []
    for index in range(max(1, int(rate * seconds))):
        await asyncio.sleep(max(0.0, began + index / rate - time.perf_counter()))
        tasks.append(asyncio.create_task(one()))
    return list(await asyncio.gather(*tasks))


async def _crowd(way: Way, calls: int) -> list[float]:
    """Have a caller for each environment, and each its share of the calls."""
    shares = [calls // way.environments + (number < calls % way.environments) for number in range(way.environments)]

    async def caller(number: int) -> list[float]:
        return [await _timed(way, number) for _ in range(shares[number])]

    return [one for some in await asyncio.gather(*map(caller, range(way.environments))) for one in some]


async def _timed(way: Way, number: int) -> float:
    began = time.perf_counter()
    await way.call(number)
    return time.perf_counter() - began


async def _reference(folder: Path) -> dict[str, Any] | None:
    """Measure SWE-ReX's own server with its own client: sessions at once, and empty commands one after another."""
    async with _own_server(folder) as (url, token):
        way = Reference(REFERENCE_SESSIONS, lambda _: url, token)
        await way.ready()
        await way.open()
        times = await _alone(way, REFERENCE_CALLS)
        await way.close()
    return {"sessions_per_s": way.created_per_s, "p50_ms": median(times) * MS, "calls": len(times)}


@asynccontextmanager
async def _own_server(folder: Path) -> AsyncIterator[tuple[str, str]]:
    port, token = free_port(), secrets.token_hex(8)
    argv = [sys.executable, "-m", "swerex.server", "--host", "127.0.0.1", "--port", str(port), "--auth-token", token]
    with (folder / "swerex.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*argv, stdout=log, stderr=log)
        try:
            yield f"http://127.0.0.1:{port}", token
        finally:
            process.terminate()
            await process.wait()


def _p99(times: list[float]) -> float:
    return quantiles(times, n=100, method="inclusive")[98] if len(times) > 1 else times[0]


def _say(line: str) -> None:
    print(f"bench.gateway: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
