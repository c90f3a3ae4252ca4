"""What a worker counts of the actions that it runs. Beats, instances and grants are the scheduler's to tell."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from app.action_task import Call
from app.metrics.bounded import Names
from app.metrics.exposition import make_registry, serve
from app.metrics.families import counter, gauge, gauge_family, histogram
from tangram.settings import Settings


class WorkerMetrics:
    """The figures of one worker process; safe for many threads."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._kinds = Names()
        self._running = gauge("tangram_worker_actions_running", registry)
        self._ended = counter("tangram_worker_actions_total", registry)
        self._execution = histogram("tangram_worker_execution_seconds", registry)
        self._cpu = counter("tangram_worker_cpu_seconds_total", registry)

    def began(self, kind: str) -> None:
        """Note that a message with a grant is being run."""
        self._running.labels(self._kinds.label(kind)).inc()

    def ended(self, kind: str, call: Call | None) -> None:
        """Note its end; `call` is the try that it claimed, None where it was dropped."""
        label = self._kinds.label(kind)
        self._running.labels(label).dec()
        if call is not None:
            self._ended.labels(label, call.status).inc()
            self._execution.labels(label).observe(call.execution_s or 0.0)
            self._cpu.labels(label).inc(max(0.0, call.cpu_s))

    def watch(self, now: Callable[[], dict[str, Any]]) -> None:
        """Ask `now`, which returns the parts of the node's description that change, for its environments at each scrape."""
        self.registry.register(_Environments(now))


class _Environments(Collector):
    def __init__(self, now: Callable[[], dict[str, Any]]) -> None:
        self._now = now

    def collect(self) -> Iterable[Metric]:
        changing = self._now()
        if "environments" in changing:
            yield gauge_family("tangram_worker_environments", [((), len(changing["environments"]))])


def start(settings: Settings, pool: str) -> WorkerMetrics:
    """Serve the metrics of a worker process."""
    metrics = WorkerMetrics(make_registry(settings, f"worker {pool}"))
    serve(settings, metrics.registry)
    return metrics
