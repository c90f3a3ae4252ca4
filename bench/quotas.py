"""A fleet under the quota of an outside API that counts strictly: how often it is refused, how much of the quota it uses.

`python -m bench.quotas` runs the embedded stack with two API workers against a server of its own process that lets 50
requests in any second and 20 at a time come through and answers 429 otherwise (`bench/strict_api.py`). 500 trajectories,
coroutines of one `AsyncClient`, make four calls each. All start at once, so the queue is full until the end. The exit
code is 0 if nothing was refused after the first second and at least 95 % of the quota was used.

| figure | meaning |
|---|---|
| refused | answers of status 429; those that trainers saw are `unanswered` |
| rate | calls let in, over the time from the first arrival to the last |
| stalled | refusals in the second after the server's process stood still, as many as could have piled up meanwhile |
| fullest | most arrivals in any second of the server's clock |
| jitter | how much earlier than the even spacing of the request before it a request arrives: p50, p99, most |
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from app.local import stack
from bench.tools import running
from tangram import AsyncClient
from tangram.settings import Settings

RATE, CONCURRENCY = 50, 20
LEAST_USED = 0.95
WORK_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What came of a run."""

    calls: int
    refused: int
    refused_later: int
    stalled: int
    unanswered: int
    rate_per_s: float
    used: float
    fullest_second: int
    most_running: int
    jitter_ms_p50: float
    jitter_ms_p99: float
    jitter_ms_most: float


@contextlib.contextmanager
def outside() -> Iterator[str]:
    """Run an outside API in a process of its own, whose clock no client of ours disturbs; give where it is."""
    with subprocess.Popen([sys.executable, "-m", "bench.strict_api"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None and server.stdout is not None, "both are pipes"
        try:
            yield server.stdout.readline().strip()
        finally:
            server.stdin.close()


def plan(folder: Path, *, margin: float | None = None) -> stack.StackPlan:
    """Return a stack with two API workers and the quota."""
    services = folder / "services.toml"
    lines = ["[quotas.search]", f"rate_per_s = {RATE}", f"concurrency = {CONCURRENCY}", 'hosts = ["127.0.0.1"]']
    services.write_text("\n".join([*lines, *([f"margin = {margin}"] if margin is not None else []), ""]))
    return stack.StackPlan(cores=1, api_nodes=2, services_file=services)


async def call_all(settings: Settings, url: str, trajectories: int, each: int) -> list[int]:
    """Have every trajectory make its calls, one after another; return the status codes."""
    async with AsyncClient(job="bench", settings=settings) as client:

        async def roll_out(number: int) -> list[int]:
            answers = [await client.call("search", url=url, trajectory=f"t{number}") for _ in range(each)]
            return [answer.status_code for answer in answers]

        return [status for found in await asyncio.gather(*map(roll_out, range(trajectories))) for status in found]


def seen(url: str, account: str) -> dict[str, Any]:
    """Return what the server saw of an account since it was last asked, and when it stood still."""
    counts = httpx.get(f"{url}/counts?account={account}", timeout=30).raise_for_status().json()
    return {**counts, "stalls": httpx.get(f"{url}/stalls", timeout=30).raise_for_status().json()}


def refusals(counts: dict[str, Any], rate: float) -> list[float]:
    """Return when requests were refused that no stall of the server itself accounts for.

    What comes while the process stands still, `rate` a second at most, arrives at once when it goes on: too much for the second after.
    """
    excused = [[end - long_s, end + 1.0, math.ceil(long_s * rate)] for end, long_s in counts["stalls"]]
    left = []
    for at in [at for at, one in zip(counts["arrivals"], counts["let_in"], strict=True) if not one]:
        stall = next((stall for stall in excused if stall[0] <= at <= stall[1] and stall[2]), None)
        if stall is None:
            left.append(at)
        else:
            stall[2] -= 1
    return left


def figures(counts: dict[str, Any], statuses: Sequence[int], rate: float, margin: float = 0.03) -> Figures:
    """Work the figures out of what the server and the trainers saw."""
    arrivals, let_in = counts["arrivals"], counts["let_in"]
    first = arrivals[0]
    came_in = [at for at, one in zip(arrivals, let_in, strict=True) if one]
    rate_per_s = (len(came_in) - 1) / (came_in[-1] - came_in[0])
    fullest = left = 0
    for right, at in enumerate(arrivals):
        while arrivals[left] <= at - 1.0:
            left += 1
        fullest = max(fullest, right - left + 1)
    spacing = 1.0 / (rate * (1.0 - margin))
    late = [max(0.0, spacing - (at - before)) for before, at in pairwise(arrivals)]
    late.sort()
    return Figures(
        calls=len(statuses),
        refused=let_in.count(False),
        refused_later=sum(not one for at, one in zip(arrivals, let_in, strict=True) if at > first + 1.0),
        stalled=let_in.count(False) - len(refusals(counts, rate)),
        unanswered=sum(status != 200 for status in statuses),
        rate_per_s=round(rate_per_s, 2),
        used=round(rate_per_s / rate, 4),
        fullest_second=fullest,
        most_running=counts["most_running"],
        jitter_ms_p50=round(1e3 * late[len(late) // 2], 2),
        jitter_ms_p99=round(1e3 * late[int(len(late) * 0.99)], 2),
        jitter_ms_most=round(1e3 * late[-1], 2),
    )


def measure(trajectories: int, each: int, margin: float | None = None) -> Figures:
    """Run a fleet once, on a stack of its own."""
    with tempfile.TemporaryDirectory(prefix="tangram-quotas-") as name, outside() as url:
        folder = Path(name)
        httpx.put(f"{url}/limits?account=a&rate={RATE}&concurrency={CONCURRENCY}").raise_for_status()
        whole = plan(folder, margin=margin)
        with running(whole) as started:
            settings = stack.settings_of(started, Settings())
            statuses = asyncio.run(call_all(settings, f"{url}/limited?account=a&seconds={WORK_S}", trajectories, each))
        return figures(seen(url, "a"), statuses, RATE, 0.03 if margin is None else margin)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return 0 if the quota was kept and used."""
    parser = argparse.ArgumentParser(prog="python -m bench.quotas", description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--trajectories", type=int, default=500)
    parser.add_argument("--calls", type=int, default=4, help="calls of each trajectory")
    parser.add_argument("--margin", type=float, default=None, help="margin of the quota, instead of its default")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    found = measure(options.trajectories, options.calls, options.margin)
    kept = not found.refused_later and not found.unanswered and found.used >= LEAST_USED
    print(json.dumps({**asdict(found), "kept": kept}, indent=2) if options.json else text(found, kept))
    return 0 if kept else 1


def text(found: Figures, kept: bool) -> str:
    """Return the figures as a person reads them."""
    return "\n".join(
        [
            f"calls            {found.calls}, {found.unanswered} without an answer of 200",
            f"refused          {found.refused}, {found.refused_later} after the first second, {found.stalled} after it stood still",
            f"rate             {found.rate_per_s:.2f} /s, {100 * found.used:.1f} % of the quota of {RATE} /s",
            f"fullest second   {found.fullest_second} requests; at most {found.most_running} of {CONCURRENCY} at a time",
            f"jitter           {found.jitter_ms_p50:.1f} ms p50, {found.jitter_ms_p99:.1f} ms p99, {found.jitter_ms_most:.1f} ms at most",
            "the quota was kept and used" if kept else "the quota was not kept, or not used",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
