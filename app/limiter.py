"""How a strict outside API counts: so many requests in any second, so many at a time, and not one more.

The second slides: a request counts for exactly one second after its arrival, whatever a calendar second is. That is
the strictest reading of "r requests per second"; whoever pleases it pleases buckets and fixed windows of a second, too.
"""

from __future__ import annotations

import threading
from collections import deque

WINDOW_S = 1.0


class SlidingLimits:
    """One account. For use by many threads; 0 is no limit."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rate = self._concurrency = 0
        self._window: deque[float] = deque()
        self._running = self._most_running = 0
        self._arrivals: list[tuple[float, bool]] = []

    def allow(self, rate: int, concurrency: int) -> None:
        """Set the limits: requests in a second, and at a time."""
        with self._lock:
            self._rate, self._concurrency = rate, concurrency

    def enter(self, now: float) -> str | None:
        """Count a request that arrives; return why it is refused, None where it is not. What is refused does not count."""
        with self._lock:
            while self._window and self._window[0] <= now - WINDOW_S:
                self._window.popleft()
            refused = None
            if self._rate and len(self._window) >= self._rate:
                refused = f"more than {self._rate} requests in a second"
            elif self._concurrency and self._running >= self._concurrency:
                refused = f"more than {self._concurrency} requests at a time"
            self._arrivals.append((now, refused is None))
            if refused is None:
                self._window.append(now)
                self._running += 1
                self._most_running = max(self._most_running, self._running)
            return refused

    def leave(self) -> None:
        """Count a request that was let in and is over."""
        with self._lock:
            self._running -= 1

    def counts(self) -> dict[str, object]:
        """Return and forget what has arrived: `arrivals` on the server's clock, whether each was `let_in`, most at a time."""
        with self._lock:
            arrivals, self._arrivals = self._arrivals, []
            most, self._most_running = self._most_running, self._running
        return {"arrivals": [at for at, _ in arrivals], "let_in": [let_in for _, let_in in arrivals], "most_running": most}


class Accounts:
    """Accounts by name, made when first named."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_name: dict[str, SlidingLimits] = {}

    def of(self, name: str) -> SlidingLimits:
        """Return the account of that name."""
        with self._lock:
            return self._by_name.setdefault(name, SlidingLimits())
