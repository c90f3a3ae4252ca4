"""What a gateway process counts, for Prometheus at `/metrics`: failures of the system by cause, and how late its event loop runs."""

from __future__ import annotations

import asyncio
import time

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

LOOK_S = 0.05
"""Seconds between two measurements of the event loop's lag."""

_LAGS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


class Metrics:
    """The counters of one process."""

    def __init__(self) -> None:
        """Start at nought."""
        self._registry = CollectorRegistry()
        self.infra_failed = Counter(
            "tangram_gateway_infra_failed", "Calls that failed by a fault of the system.", ["shape", "cause"], registry=self._registry
        )
        self.lag = Histogram(
            "tangram_gateway_loop_lag_seconds", "How late the event loop ran a timer.", buckets=_LAGS, registry=self._registry
        )

    def page(self) -> bytes:
        """Return the page that Prometheus reads."""
        return generate_latest(self._registry)

    async def watch_loop(self) -> None:
        """Measure the event loop's lag until cancelled."""
        while True:
            due = time.monotonic() + LOOK_S
            await asyncio.sleep(LOOK_S)
            self.lag.observe(max(0.0, time.monotonic() - due))
