"""Who listens to what Celery says of a worker's messages: the node, the metrics, the spans, and what keeps threads on one core."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import signals

from app.action_task import call_of
from app.preconditions import needed_for_metrics
from tangram.settings import Settings
from tangram.tracing import tracer_of
from tangram.wire import GRANT_HEADER
from workers.cpu.home_core import HomeCore
from workers.node import Node


def listen(node: Node) -> None:
    """Have Celery tell the node what becomes of each message."""

    def arrived(request: Any, **_: Any) -> None:
        if GRANT_HEADER in request.request_dict:
            node.note_arrival(request.id)

    def ran(task: Any, **_: Any) -> None:
        call = call_of(task)
        if call is not None:
            node.finish(call)

    def unknown(name: str, id: str, message: Any, **_: Any) -> None:
        grant = message.headers.get(GRANT_HEADER)
        if grant is not None:
            reason = f"node {node.name} knows no task {name!r}: name its module with `tangram worker --include`"
            node.refuse(id, grant["attempt"], "failed", reason, "impossible")

    def revoked(request: Any, expired: bool, **_: Any) -> None:
        grant = getattr(request, GRANT_HEADER, None)
        if grant is not None:
            reason = "its message expired" if expired else "revoked through Celery"
            node.refuse(request.id, grant["attempt"], "cancelled", reason, "cancelled")

    signals.worker_ready.connect(lambda **_: node.join(), weak=False)
    signals.task_received.connect(arrived, weak=False)
    signals.task_postrun.connect(ran, weak=False)
    signals.task_unknown.connect(unknown, weak=False)
    signals.task_revoked.connect(revoked, weak=False)


def count(settings: Settings, pool: str, now: Callable[[], dict[str, Any]]) -> None:
    """Have Celery tell the metrics what runs, where there is a port for them; else their library is not even imported."""
    if settings.metrics_port is None:
        return
    with needed_for_metrics():
        from app.metrics.worker import start
    metrics = start(settings, pool)

    def began(task: Any, **_: Any) -> None:
        if task.request.get(GRANT_HEADER) is not None:
            metrics.began(task.name)

    def ended(task: Any, **_: Any) -> None:
        if task.request.get(GRANT_HEADER) is not None:
            metrics.ended(task.name, call_of(task))

    metrics.watch(now)
    signals.task_prerun.connect(began, weak=False)
    signals.task_postrun.connect(ended, weak=False)


def trace(settings: Settings, pool: str) -> None:
    """Have Celery tell the spans what runs, where they are on."""
    tracer = tracer_of(settings, f"tangram-worker-{pool}")
    if tracer is not None:
        from app.spans import trace_tasks

        trace_tasks(tracer)


def settle(home: HomeCore) -> None:
    """Keep the threads that take messages and run this system's tasks on the worker's home core. Tasks of users run anywhere."""
    signals.task_received.connect(lambda **_: home.settle(own=True), weak=False)
    signals.task_prerun.connect(lambda task, **_: home.settle(own=getattr(task, "payload", True)), weak=False)
