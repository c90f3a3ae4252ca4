"""Waiting for what happens in another thread or process."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(condition: Callable[[], object], timeout_s: float = 60.0, longest_pause_s: float = 0.03) -> None:
    """Wait for a condition. Pauses between looks grow, since looks take the CPU from what is waited for."""
    end, pause_s = time.monotonic() + timeout_s, 0.002
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(pause_s)
        pause_s = min(1.3 * pause_s, longest_pause_s)
