"""Figures of a whole stack on this machine: what of an action is in none of its parts, and what an outage or a hung broker costs."""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import time
from pathlib import Path
from statistics import median

from prometheus_client import CollectorRegistry, generate_latest

from app.celery import make_app
from app.local import stack
from app.local.redis_server import RedisServer
from app.local.stack import StackPlan
from app.metrics.celery_events import CeleryEvents
from bench.figures.registry import figure
from bench.tools import process_of, running, until, used_s, wait_s
from tangram import Client, Settings

PLAN = StackPlan(cores=2, memory_mb=4096, api_nodes=0)
OUTAGE_S = 3.0


@figure("ms")
def act_unaccounted() -> float:
    """Return what a caller waits for a command beyond the parts of its ACT, median of 40."""
    missing = []
    with running(PLAN) as started, Client(settings=stack.settings_of(started, Settings())) as client, client.open(trajectory="t") as env:
        for _ in range(40):
            began = time.perf_counter()
            act = env.exec("true").act
            missing.append(time.perf_counter() - began - act.queue_s - act.overhead_s - act.execution_s)
    return 1e3 * median(missing)


@figure("% of a core")
def outage_busy() -> float:
    """Return CPU time of the scheduler or the worker, whichever has more, while Redis is away for 3 s."""
    with running(PLAN) as started:
        processes = [process_of(started, name) for name in ("scheduler", "cpu-0")]
        process_of(started, "redis").send_signal(signal.SIGKILL)
        until(lambda: "redis" in started.dead())
        before = [used_s(process) for process in processes]
        time.sleep(OUTAGE_S)
        busy_s = max(used_s(process) - used for process, used in zip(processes, before, strict=True))
        started.restart("redis")
    return 100 * busy_s / OUTAGE_S


@figure("s")
def scrape_hung_broker() -> float:
    """Return how long a scrape takes while the broker stands still, of which the lengths of its queues may take 2 s."""
    logging.getLogger("app.metrics").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="tangram-figures-") as folder:
        server = RedisServer(Path(folder), log=Path(folder) / "redis.log")
        try:
            registry = CollectorRegistry()
            CeleryEvents(make_app(Settings(broker_url=server.url, result_url=server.url, state_dir=Path(folder))), registry)
            generate_latest(registry)
            os.kill(server.process.identity.pid, signal.SIGSTOP)
            try:
                return wait_s(lambda: generate_latest(registry))
            finally:
                os.kill(server.process.identity.pid, signal.SIGCONT)
        finally:
            server.stop()
