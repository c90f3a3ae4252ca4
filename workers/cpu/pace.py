"""A bound on how often the worker turns to what a program writes, which no grant bounds: each turn costs time that all commands share."""

from __future__ import annotations

import time

TURN_S, BURST_TURNS = 0.001, 200


class Pace:
    """Lets turns pass at once, `BURST_TURNS` of them, then one each `TURN_S`."""

    def __init__(self) -> None:
        self._until = float("-inf")

    def keep(self) -> None:
        """Wait until the next turn may pass."""
        now = time.monotonic()
        self._until = max(self._until, now - BURST_TURNS * TURN_S) + TURN_S
        if self._until > now:
            time.sleep(self._until - now)
