"""The endpoint of a process: its registry, served at `/metrics` of `TANGRAM_METRICS_HOST` and `TANGRAM_METRICS_PORT`.

Without a port nothing is counted. A port that is taken is one line in the log, and the process goes on: what measures must not end
what is measured. Prometheus then finds no target, or another process's, and the alert `TangramProcessUnreachable` says so.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector, disable_created_metrics, start_http_server
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from app.metrics.families import gauge, gauge_family
from tangram.settings import Settings

log = logging.getLogger(__name__)

# When each series began doubles the page, and nothing asks for it.
disable_created_metrics()  # type: ignore[no-untyped-call]


def make_registry(settings: Settings, process: str) -> CollectorRegistry:
    """Return the registry of a process, with what every process has; `process` names its kind, such as `scheduler`."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)
    registry.register(_Disk(settings.state_dir))
    gauge("tangram_build_info", registry).labels(version=_version(), process=process).set(1)
    return registry


def serve(settings: Settings, registry: CollectorRegistry) -> None:
    """Serve a registry in a thread, where there is a port for it."""
    if settings.metrics_port is None:
        return
    where = f"{settings.metrics_host}:{settings.metrics_port}"
    try:
        start_http_server(settings.metrics_port, settings.metrics_host, registry)
    except OSError as error:
        log.error("no metrics at TANGRAM_METRICS_PORT, %s: %s", where, error.strerror or error)
    else:
        log.info("metrics at http://%s/metrics", where)


class _Disk(Collector):
    """Free space, asked for at each scrape."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> Iterable[Metric]:
        with suppress(OSError):
            folder = next(one for one in (self._folder, *self._folder.absolute().parents) if one.exists())
            usage = shutil.disk_usage(folder)
            for name, value in (("tangram_disk_free_bytes", usage.free), ("tangram_disk_size_bytes", usage.total)):
                yield gauge_family(name, [((), value)])


def _version() -> str:
    try:
        return version("arl-tangram")
    except PackageNotFoundError:
        return "unknown"
