"""What a gateway process counts, for Prometheus at `/metrics`: failures of the system by cause, and how late its event loop runs."""

from __future__ import annotations

from prometheus_client import generate_latest

from app.metrics.exposition import make_registry, serve
from app.metrics.families import counter, histogram
from app.metrics.loop_lag import watch_loop
from tangram.settings import Settings


class Metrics:
    """The counters of one process."""

    def __init__(self, settings: Settings) -> None:
        self._registry = make_registry(settings, "gateway")
        self.infra_failed = counter("tangram_gateway_infra_failed_total", self._registry)
        self.lag = histogram("tangram_gateway_loop_lag_seconds", self._registry)

    def serve(self, settings: Settings) -> None:
        """Serve the page at the port for metrics too, where there is one."""
        serve(settings, self._registry)

    def page(self) -> bytes:
        """Return the page that Prometheus reads."""
        return generate_latest(self._registry)

    async def watch_loop(self) -> None:
        """Measure the event loop's lag until cancelled."""
        await watch_loop(self.lag)
