"""How late an event loop runs its timers: what a caller waits because the loop is busy with something else."""

from __future__ import annotations

import asyncio
import time

from prometheus_client import Histogram

LOOK_S = 0.05
"""Seconds between two measurements."""


async def watch_loop(lag: Histogram) -> None:
    """Measure the lag of the running event loop, in seconds, until cancelled."""
    while True:
        due = time.monotonic() + LOOK_S
        await asyncio.sleep(LOOK_S)
        lag.observe(max(0.0, time.monotonic() - due))
