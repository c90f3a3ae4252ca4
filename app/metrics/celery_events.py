"""Celery's own events as metrics, under the names of the usual exporter: `tangram metrics`, a process of its own.

Workers send events once somebody asks for them, as Flower does, so this process asks now and then. What it counts begins with it. The
lengths of the broker's queues are asked for at each scrape.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from celery import Celery
from celery.events.state import State
from kombu import Connection
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from app.metrics.bounded import IDLE_S, Names
from app.metrics.exposition import make_registry, serve
from app.metrics.families import counter, gauge, gauge_family, histogram
from tangram.settings import Settings
from tangram.wire import CONTROL_QUEUE, EVENTS_QUEUE, INGRESS_QUEUE, NODE_QUEUE_PREFIX, of_shard

log = logging.getLogger(__name__)

ASK_S = 5.0
"""How often workers are asked for events: one that has just started sends none before."""

TASKS_REMEMBERED = 10_000
PAUSE_S = 1.0
LENGTHS_S = 2.0
"""How long a scrape waits for the lengths of the queues; all other figures need no broker."""

EVENTS = ("received", "started", "succeeded", "failed", "retried", "revoked", "rejected")


class CeleryEvents(Collector):
    """Counts events; `collect` belongs to a scrape, all else to one thread."""

    def __init__(self, app: Celery, registry: CollectorRegistry, shards: int = 1) -> None:
        self._app = app
        self._shards = range(shards)
        self._state = State(max_tasks_in_memory=TASKS_REMEMBERED)
        self._names, self._exceptions = Names(), Names()
        self._lock = threading.Lock()
        self._heard_at: dict[str, float] = {}
        """When each worker was heard of last, by its name and host."""
        self._tasks = {event: counter(f"celery_task_{event}_total", registry) for event in EVENTS}
        self._runtime = histogram("celery_task_runtime", registry)
        self._up, self._active = gauge("celery_worker_up", registry), gauge("celery_worker_tasks_active", registry)
        self._asking = ThreadPoolExecutor(1, "tangram-queue-lengths")
        self._asked: Future[Iterable[Metric]] | None = None
        registry.register(self)

    def take(self, event: dict[str, Any]) -> None:
        """Take in an event."""
        self._state.event(event)
        sort, _, what = event["type"].partition("-")
        if sort == "worker" or what in self._tasks:
            with self._lock:
                self._heard_at[event["hostname"]] = time.monotonic()
        if sort == "worker":
            self._up.labels(event["hostname"]).set(what != "offline")
            self._active.labels(event["hostname"]).set(event.get("active", 0) if what != "offline" else 0)
        elif sort == "task" and what in self._tasks:
            task = self._state.tasks.get(event["uuid"])
            labels = [self._names.label(task.name or "" if task is not None else ""), event["hostname"]]
            if what == "succeeded":
                self._runtime.labels(*labels).observe(event.get("runtime") or 0.0)
            if what == "failed":
                labels.append(self._exceptions.label(str(event.get("exception", "")).partition("(")[0]))
            self._tasks[what].labels(*labels).inc()

    def silent(self) -> None:
        """Note which workers' heartbeats have not come for too long, and forget workers that have been away for `IDLE_S`."""
        for name, worker in list(self._state.workers.items()):
            if not worker.alive:
                self._up.labels(name).set(0)
        for name in [name for name, heard_at in self._heard_at.items() if time.monotonic() - heard_at > IDLE_S]:
            with self._lock:
                del self._heard_at[name]
            self._state.workers.pop(name, None)
            for metric in (self._up, self._active, self._runtime, *self._tasks.values()):
                metric.remove_by_labels({"hostname": name})

    def collect(self) -> Iterable[Metric]:
        """Return how long the broker's queues are; nothing while it is away, or has not answered in `LENGTHS_S`."""
        if self._asked is None or self._asked.done():
            self._asked = self._asking.submit(self._lengths)
        try:
            return self._asked.result(LENGTHS_S)
        except TimeoutError:
            log.warning("the broker does not tell the lengths of its queues in %g s", LENGTHS_S)
            return []

    def _lengths(self) -> Iterable[Metric]:
        with self._lock:
            of_schedulers = [of_shard(name, shard) for shard in self._shards for name in (INGRESS_QUEUE, EVENTS_QUEUE, CONTROL_QUEUE)]
            nodes = {name.partition("@")[0] for name in self._heard_at}
            queues = [*of_schedulers, *(NODE_QUEUE_PREFIX + node for node in sorted(nodes))]
        family = gauge_family("celery_queue_length")
        connection = self._app.connection_for_read()
        try:
            for queue in queues:
                family.add_metric([queue], _length(connection, queue))
        except Exception as error:  # every transport has errors of its own
            log.warning("the broker does not tell the lengths of its queues: %s", error)
            return []
        finally:
            connection.release()
        return [family]


def _length(connection: Connection, queue: str) -> int:
    """Return the messages of a queue; one that nobody has declared has none."""
    channel = connection.channel()
    try:
        return int(channel.queue_declare(queue, passive=True).message_count)
    except connection.channel_errors:
        return 0
    finally:
        with suppress(Exception):  # RabbitMQ has closed it already where there is no such queue
            channel.close()


def run(app: Celery, settings: Settings, stop: threading.Event) -> None:
    """Count and serve until `stop` is set; a broker that is away is waited for."""
    registry = make_registry(settings, "metrics")
    events = CeleryEvents(app, registry, settings.shards)
    serve(settings, registry)
    while not stop.is_set():
        try:
            with app.connection_for_read() as connection:
                _listen(app, connection, events, stop)
        except Exception as error:  # every transport has errors of its own
            log.warning("the broker's events cannot be read; trying again: %s", error)
            stop.wait(PAUSE_S)


def _listen(app: Celery, connection: Connection, events: CeleryEvents, stop: threading.Event) -> None:
    receiver = app.events.Receiver(connection, handlers={"*": events.take}, app=app)
    ask_at = 0.0
    with receiver.Consumer() as (consuming, _, consumers):
        for consumer in consumers:
            consumer.consume()
        while not stop.is_set():
            if time.monotonic() >= ask_at:
                app.control.enable_events(connection=connection)
                events.silent()
                ask_at = time.monotonic() + ASK_S
            with suppress(socket.timeout):
                consuming.drain_events(timeout=PAUSE_S)
