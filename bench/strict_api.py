"""An outside API that counts strictly and answers 429 beyond its limits, for benchmarks and tests.

| request | answer |
|---|---|
| `GET /limited?account=a&seconds=s&tokens=t` | after s seconds `usage.total_tokens` = t; 429 beyond the limits of account a |
| `PUT /limits?account=a&rate=r&concurrency=c` | sets the limits of account a |
| `GET /counts?account=a` | the requests that account a has had since it was last asked |
| `GET /stalls` | when this process stood still: the ends, on the clock of `/counts`, and the seconds |

`python -m bench.strict_api` prints its address and serves until its standard input ends.

The limits are so many requests in any second and so many at a time. The second slides: a request counts for exactly one second after its
arrival. That is the strictest reading of "r requests per second"; a client that keeps to it also keeps to buckets and fixed windows.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from urllib.parse import parse_qs, urlsplit

from app.replay.outside_api import OutsideApi, OutsideHandler, as_seconds

WINDOW_S = 1.0
RETRY_AFTER_S = 1
_WATCHED_EVERY_S, _STALL_S = 0.005, 0.025


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


ACCOUNTS = Accounts()
STALLS: list[tuple[float, float]] = []


class _Handler(OutsideHandler):
    """Counts, and refuses what is too much."""

    def do_GET(self) -> None:
        """Answer a request."""
        parts = urlsplit(self.path)
        query = parse_qs(parts.query)
        if parts.path == "/limited":
            self._limited(query)
        elif parts.path == "/counts":
            self.answer(200, ACCOUNTS.of(_first(query, "account")).counts())
        elif parts.path == "/stalls":
            self.answer(200, list(STALLS))
        else:
            super().do_GET()

    def do_PUT(self) -> None:
        """Set the limits of an account."""
        query = parse_qs(urlsplit(self.path).query)
        rate, concurrency = (as_seconds(_first(query, name, "0")) for name in ("rate", "concurrency"))
        ACCOUNTS.of(_first(query, "account")).allow(int(rate), int(concurrency))
        self.answer(200, {})

    def _limited(self, query: Mapping[str, list[str]]) -> None:
        account = ACCOUNTS.of(_first(query, "account"))
        refused = account.enter(time.monotonic())
        if refused is not None:
            self.answer(429, {"error": refused}, {"Retry-After": str(RETRY_AFTER_S)})
            return
        try:
            time.sleep(as_seconds(_first(query, "seconds", "0")))
        finally:
            account.leave()
        self.answer(200, {"usage": {"total_tokens": int(as_seconds(_first(query, "tokens", "0")))}})


def _first(query: Mapping[str, list[str]], name: str, default: str = "") -> str:
    return query.get(name, [default])[0]


def _watch() -> None:
    """Note when this process stands still: requests that arrive meanwhile are all counted at the moment when it goes on."""
    before = time.monotonic()
    while True:
        time.sleep(_WATCHED_EVERY_S)
        now = time.monotonic()
        if now - before > _WATCHED_EVERY_S + _STALL_S:
            STALLS.append((now, now - before))
        before = now


if __name__ == "__main__":
    with OutsideApi(_Handler) as api:
        threading.Thread(target=_watch, name="outside-stalls", daemon=True).start()
        print(api.base_url, flush=True)
        sys.stdin.read()
