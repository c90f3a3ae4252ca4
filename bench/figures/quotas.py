"""Figures of a quota of 50 requests a second, at a server that counts strictly (`bench/quotas.py`)."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from functools import cache
from pathlib import Path

import httpx

from app.journal.database import open_engine
from app.local import stack
from bench import quotas
from bench.figures.registry import figure
from bench.tools import NotMeasured, process_of, running, until
from tangram.settings import Settings

TRAJECTORIES, CALLS = 150, 4
RESTARTED_AT = 60
"""After how many requests the scheduler is killed."""


@figure("% of the quota")
def quota_used() -> float:
    """Return requests let in while 150 trajectories make 600 calls, part of what the quota allows."""
    return 100 * _fleet().used


@figure("requests")
def quota_refused() -> float:
    """Return refusals after the first second while 150 trajectories make 600 calls."""
    return _fleet().refused_later


@figure("requests")
def quota_refused_after_restart() -> float:
    """Return refusals after the first second of 150 calls during which the scheduler is killed and starts again."""
    found: list[int] = []
    with tempfile.TemporaryDirectory(prefix="tangram-figures-") as name, quotas.outside() as url:
        plan = quotas.plan(Path(name))
        httpx.put(f"{url}/limits?account=a&rate={quotas.RATE}&concurrency={quotas.CONCURRENCY}").raise_for_status()
        with running(plan) as started:
            settings, address = stack.settings_of(started, Settings()), f"{url}/limited?account=a&seconds=0.05"
            calling = threading.Thread(target=lambda: found.extend(asyncio.run(quotas.call_all(settings, address, 150, 1))))
            calling.start()
            until(lambda: _ended(started.database_url) > RESTARTED_AT)
            process_of(started, "scheduler").kill()
            until(lambda: "scheduler" in started.dead())
            started.restart("scheduler")
            calling.join()
        counts = quotas.seen(url, "a")
    if found.count(200) != 150:
        raise NotMeasured(f"{150 - found.count(200)} calls have no answer of 200")
    return sum(at > counts["arrivals"][0] + 1.0 for at in quotas.refusals(counts, quotas.RATE))


def _ended(database_url: str) -> int:
    engine = open_engine(database_url)
    with engine.connect() as connection:
        found = connection.exec_driver_sql("SELECT count(*) FROM actions WHERE ended_at IS NOT NULL").scalar_one()
    engine.dispose()
    return int(found)


@cache
def _fleet() -> quotas.Figures:
    return quotas.measure(TRAJECTORIES, CALLS)
