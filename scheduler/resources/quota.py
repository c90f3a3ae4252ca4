"""Quotas: how many requests per second, and at once, an outside API allows.

The rate is the generic cell rate algorithm (ITU-T I.371): one theoretical arrival time per quota instead of a
bucket that must be refilled. A request conforms when it is at most `burst - 1` intervals early; without a declared
burst requests are evenly spaced.
"""

from __future__ import annotations

from scheduler.model import QuotaSpec
from scheduler.resources.queue import WaitQueue

_ROUNDING_S = 1e-9


class QuotaState:
    """One quota, its queue and what runs under it."""

    def __init__(self, spec: QuotaSpec) -> None:
        self.spec = spec
        self.queue = WaitQueue()
        self.running = 0
        self._next_s = float("-inf")

    def opens_at(self, now: float, requests: int = 1) -> float | None:
        """Return when so many requests may start at once: `now` or later; None while all places are taken."""
        if self.spec.concurrency is not None and self.running + requests > self.spec.concurrency:
            return None
        if self.spec.rate_per_s is None:
            return now
        earliest = self._next_s - max(0, (self.spec.burst or 1) - requests) / self.spec.rate_per_s
        return now if earliest <= now + _ROUNDING_S else earliest

    def take(self, now: float, requests: int = 1) -> None:
        """Start so many requests now."""
        self.running += requests
        if self.spec.rate_per_s is not None:
            self._next_s = max(self._next_s, now) + requests / self.spec.rate_per_s

    def give_back(self, requests: int = 1) -> None:
        """End so many requests."""
        self.running -= requests
