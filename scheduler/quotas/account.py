"""Accounts: the limits of an outside API on requests and tokens per time and on requests at once, and their use.

The limits belong to the account: several quotas may name the same account, and share its queue, places and rates.

1. A rate is the generic cell rate algorithm (ITU-T I.371): one theoretical arrival time instead of a bucket that must
   be refilled. A request conforms when it is at most `burst - 1` intervals early; without a declared burst requests
   are evenly spaced. Tokens follow the same rule with an amount. An action starts once the tokens of earlier actions are paid off.
   So a stretch of time sees its part of the rate, and at most one action's tokens more.
2. The real cost in tokens is known afterwards. Its difference from the declared cost moves the arrival time: debts are paid off
   before the next action starts.
3. With `lead_s` an action may be granted this long ahead of its time, together with the time to go (`Grant.not_before`). Then a
   commit, the broker or a busy thread on the way makes no request late.
4. A worker reports requests that went out late (`events.Sent`). A server with a sliding window sees late requests together with
   later ones. So `Window` counts requests when they went out: no stretch of `period_s` sees more than `most`. Requests without a
   report count as going out on time.
5. With `margin`, both stay a little below the declared rate, since a server counts arrivals and a worker counts departures. A
   margin m makes up for travelling times that differ by less than m / (1 - m) seconds, whatever the rate.
6. `throttle.py` handles the server's refusals. Its factor lowers both rates, or the places if there is no rate of requests.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import replace

from scheduler.model import QuotaSpec
from scheduler.model.group import Changeable
from scheduler.model.queue import WaitQueue
from scheduler.quotas.throttle import Throttle

WINDOW_S = 1.0
"""The period over which a rate per second is usually counted; longer if the interval between requests is longer."""

_ROUNDING_S = 1e-9


class Pace:
    """Amounts at a rate. All taken amounts are paid off at `next_s`."""

    def __init__(self, rate_per_s: float) -> None:
        self.rate_per_s = rate_per_s
        self.next_s = float("-inf")

    def take(self, now: float, amount: float, factor: float) -> None:
        """Take an amount at `now`."""
        self.next_s = max(self.next_s, now) + amount / (self.rate_per_s * factor)

    def charge(self, amount: float, now: float) -> None:
        """Add an amount to the debt, or take it away if negative."""
        if amount > 0:  # past time gives no credit for the additional amount
            self.next_s = max(self.next_s, now)
        self.next_s += amount / self.rate_per_s


class Window:
    """The times at which requests went out: at most `most` in any stretch of `period_s`.

    `most` is the number of requests that the declared rate allows in `WINDOW_S`, at least 1, plus `burst` - 1. `period_s` is the
    time in which the rate less the margin allows as many, without the burst.
    """

    def __init__(self, rate_per_s: float, margin: float, burst: int) -> None:
        in_time = max(1, int(rate_per_s * WINDOW_S + _ROUNDING_S))
        self.most = in_time + burst - 1
        self.period_s = in_time / (rate_per_s * (1.0 - margin))
        self._out: list[float] = []

    def opens_at(self) -> float:
        """Return when one more request may go out.

        An action with several requests goes with its first. Otherwise small actions could pass it for ever.
        """
        return self._out[-self.most] + self.period_s if len(self._out) >= self.most else float("-inf")

    def count(self, at: float, requests: int) -> None:
        """Count requests that go out at `at`, at most as many as fill the window. Old requests are forgotten."""
        for _ in range(min(requests, self.most)):
            insort(self._out, at)
        del self._out[: bisect_left(self._out, self._out[-1] - 2 * self.period_s)]

    def move(self, from_s: float, to_s: float, requests: int) -> None:
        """Count requests as gone out at `to_s` instead of at `from_s`. They may be forgotten already."""
        first = bisect_left(self._out, from_s)
        found = sum(at == from_s for at in self._out[first : first + min(requests, self.most)])
        del self._out[first : first + found]
        self.count(to_s, requests)


class Rate:
    """A rate of requests. Its pace grants them, and its window counts them when they went out."""

    def __init__(self, rate_per_s: float, margin: float, burst: int) -> None:
        self._pace = Pace(rate_per_s * (1.0 - margin))
        self._window = Window(rate_per_s, margin, burst)
        self._burst = burst

    def due(self, requests: int, factor: float) -> float:
        """Return when `requests` may go. They go as a burst only while the server refuses none."""
        burst = self._burst if factor == 1.0 else 1
        paced = self._pace.next_s - max(0, burst - requests) / self._pace.rate_per_s
        return max(paced, self._window.opens_at())

    def take(self, at: float, requests: int, factor: float) -> None:
        """Count requests that go out at `at`."""
        self._pace.take(at, requests, factor)
        self._window.count(at, requests)

    def move(self, from_s: float, to_s: float, requests: int) -> None:
        """Count requests as gone out at `to_s` instead of at `from_s`. The pace that granted them stays."""
        self._window.move(from_s, to_s, requests)

    def charge(self, requests: int, now: float) -> None:
        """Count requests that went out in addition to the taken ones."""
        self._pace.charge(requests, now)
        self._window.count(now, requests)


class Account(Changeable):
    """One account with its queue and its running requests."""

    def __init__(self, spec: QuotaSpec, changed: dict[Account, None]) -> None:
        super().__init__(changed)
        self.spec = spec
        self.queue = WaitQueue()
        self.running = 0
        self.throttle = Throttle()
        self._requests = None if spec.rate_per_s is None else Rate(spec.rate_per_s, spec.margin, spec.burst or 1)
        self._tokens = None if spec.tokens_per_min is None else Pace(spec.tokens_per_min / 60.0 * (1.0 - spec.margin))

    @property
    def name(self) -> str:
        """The account's name."""
        return self.spec.account or self.spec.name

    def opens_at(self, now: float, requests: int = 1, lead_s: float = 0.0) -> float | None:
        """Return when `requests` may start at once: `now` or later; None while as many run as may."""
        concurrency = self._concurrency()
        if concurrency is not None and self.running and self.running + requests > concurrency:
            return None
        earliest = max(self._due(requests) - lead_s, self.throttle.until_s)
        return now if earliest <= now + _ROUNDING_S else earliest

    def _concurrency(self) -> int | None:
        concurrency, factor = self.spec.concurrency, self.throttle.factor
        if concurrency is None or factor == 1.0 or self._requests is not None:
            return concurrency
        return max(1, int(concurrency * factor))

    def _due(self, requests: int) -> float:
        """Return when the rates allow `requests`."""
        due = float("-inf") if self._requests is None else self._requests.due(requests, self.throttle.factor)
        return due if self._tokens is None else max(due, self._tokens.next_s)

    def goes_at(self, now: float, requests: int = 1) -> float:
        """Return when requests that are granted now may go: `now`, or later if they are granted ahead of time."""
        due = self._due(requests)
        return due if due > now + _ROUNDING_S else now

    def take(self, at: float, requests: int = 1, tokens: int = 0) -> None:
        """Start `requests` that go at `at`."""
        self.running += requests
        self.spend(at, requests, tokens)

    def spend(self, at: float, requests: int, tokens: int) -> None:
        """Count requests and tokens that go, or went, at `at`."""
        if self._requests is not None:
            self._requests.take(at, requests, self.throttle.factor)
        if self._tokens is not None and tokens:
            self._tokens.take(at, tokens, self.throttle.factor)

    def went_out(self, planned_s: float, at: float, requests: int) -> None:
        """Count requests that were to go at `planned_s` as gone at `at`."""
        if self._requests is not None and at > planned_s:
            self._requests.move(planned_s, at, requests)

    def charge(self, requests: int, tokens: int, now: float) -> None:
        """Correct the taken amounts by additional requests, and by additional tokens; fewer tokens if negative."""
        if self._requests is not None and requests:
            self._requests.charge(requests, now)
        if self._tokens is not None and tokens:
            self._tokens.charge(tokens, now)

    def give_back(self, requests: int = 1) -> None:
        """End `requests`."""
        self.running -= requests


def by_quota(specs: Sequence[QuotaSpec], changed: dict[Account, None]) -> dict[str, Account]:
    """Return the account of each quota. The first quota with limits gives the account its limits."""
    accounts: dict[str, Account] = {}
    for spec in sorted(specs, key=lambda spec: not spec.limits):  # stable: quotas with limits first
        accounts.setdefault(spec.account or spec.name, Account(spec, changed))
    return {spec.name: accounts[spec.account or spec.name] for spec in specs}


def clash(specs: Sequence[QuotaSpec]) -> tuple[str, str] | None:
    """Return the first quota that cannot share its account, and why; None if all can."""
    known: dict[str, QuotaSpec] = {}
    for spec in specs:
        if spec.limits:
            first = known.setdefault(spec.account or spec.name, spec)
            if _limits_of(first) != _limits_of(spec):
                return spec.name, f"account {spec.account!r} has other limits in quota {first.name!r}"
    for spec in specs:
        if not spec.limits and (spec.account is None or spec.account not in known):
            return spec.name, "must limit something: give rate_per_s, concurrency or tokens_per_min, or the account of a quota that does"
    return None


def _limits_of(spec: QuotaSpec) -> QuotaSpec:
    """Return a quota without the fields that may differ within an account."""
    return replace(spec, name="", account=None, usage_header=None, hosts=(), extra={})
