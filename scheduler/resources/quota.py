"""Accounts: how many requests and tokens per time, and requests at once, an outside API allows, and what was taken of it.

The account is what is limited: several quotas may name the same one, and share its queue, places and rates.

1. A rate is the generic cell rate algorithm (ITU-T I.371): one theoretical arrival time instead of a bucket that must
   be refilled. A request conforms when it is at most `burst - 1` intervals early; without a declared burst requests
   are evenly spaced. Tokens are the same with an amount: an action starts once the tokens of those before it are paid
   off, so a stretch of time sees its part of the rate and at most one action's tokens more.
2. What tokens really cost is known afterwards. The difference to what was declared moves the arrival time: debts are
   paid off before the next action starts.
3. With `margin` the rate is kept a little below the declared one, since a server counts arrivals and not grants: of two
   requests a second apart the first may travel longer than the second, and then a window of one second sees one more. A
   margin m is enough as long as delays differ by less than m / (1 - m) seconds, whatever the rate.
4. With `lead_s` an action may be granted so much ahead of its time and is told when to go (`Grant.not_before`): what
   happens on the way, commit, broker, a busy thread, no longer adds to the differences. One that need not wait goes at
   once and may be late by `ON_THE_WAY_S`, and by all of the lead after a second of silence, when connections and caches
   are cold; those after it count from there.
5. What the server says is in `throttle.py`: its factor lowers both rates, or the places where there is no rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from scheduler.model import QuotaSpec
from scheduler.resources.queue import WaitQueue
from scheduler.resources.throttle import Throttle

ON_THE_WAY_S = 0.03
"""How late a request usually arrives, at most, that goes as soon as it is granted."""

IDLE_S = 1.0
"""Silence after which the first request may be late by all of the lead."""

_ROUNDING_S = 1e-9


class Pace:
    """A rate; `next_s` is when all that was taken is paid off."""

    def __init__(self, rate_per_s: float) -> None:
        self.rate_per_s = rate_per_s
        self.next_s = float("-inf")

    def take(self, now: float, amount: float, factor: float) -> None:
        """Take an amount at `now`."""
        self.next_s = max(self.next_s, now) + amount / (self.rate_per_s * factor)

    def charge(self, amount: float) -> None:
        """Add to what is to be paid off, or take away from it."""
        self.next_s += amount / self.rate_per_s


class QuotaState:
    """One account, its queue and what runs under it."""

    def __init__(self, spec: QuotaSpec) -> None:
        self.spec = spec
        self.queue = WaitQueue()
        self.running = 0
        self.throttle = Throttle()
        self._requests = _pace(spec.rate_per_s, spec.margin)
        self._tokens = _pace(None if spec.tokens_per_min is None else spec.tokens_per_min / 60.0, spec.margin)

    @property
    def account(self) -> str:
        """The account's name."""
        return self.spec.account or self.spec.name

    def opens_at(self, now: float, requests: int = 1, lead_s: float = 0.0) -> float | None:
        """Return when so many requests may start at once: `now` or later; None while all places are taken."""
        places = self._places()
        if places is not None and self.running and self.running + requests > places:
            return None
        earliest = max(self._due(requests) - lead_s, self.throttle.until_s)
        return now if earliest <= now + _ROUNDING_S else earliest

    def _places(self) -> int | None:
        places, factor = self.spec.concurrency, self.throttle.factor
        if places is None or factor == 1.0 or self._requests is not None:
            return places
        return max(1, int(places * factor))

    def _due(self, requests: int) -> float:
        """Return when the rates allow so many requests."""
        due = float("-inf")
        if self._requests is not None:
            burst = (self.spec.burst or 1) if self.throttle.factor == 1.0 else 1
            due = self._requests.next_s - max(0, burst - requests) / self._requests.rate_per_s
        return due if self._tokens is None else max(due, self._tokens.next_s)

    def take(self, now: float, requests: int = 1, tokens: int = 0) -> float:
        """Start so many requests; return when they may go: `now`, or a little later where they were granted ahead of time."""
        due = self._due(requests)
        self.running += requests
        idle = now - due > IDLE_S
        self._take(now + (self.spec.lead_s if idle else min(self.spec.lead_s, ON_THE_WAY_S)), requests, tokens)
        return max(now, due)

    def resume(self, at: float, requests: int, tokens: int) -> None:
        """Count what an earlier scheduler took at `at`, to go as late as it may have said."""
        self._take(at + self.spec.lead_s, requests, tokens)

    def _take(self, at: float, requests: int, tokens: int) -> None:
        if self._requests is not None:
            self._requests.take(at, requests, self.throttle.factor)
        if self._tokens is not None and tokens:
            self._tokens.take(at, tokens, self.throttle.factor)

    def charge(self, requests: int, tokens: int, now: float) -> None:
        """Correct what was taken by what it really was."""
        if self._requests is not None and requests:
            self._requests.next_s = max(self._requests.next_s, now)
            self._requests.charge(requests)
        if self._tokens is not None and tokens:
            if tokens > 0:  # what was paid off by now has made no credit for what comes on top
                self._tokens.next_s = max(self._tokens.next_s, now)
            self._tokens.charge(tokens)

    def give_back(self, requests: int = 1) -> None:
        """End so many requests."""
        self.running -= requests


def _pace(rate_per_s: float | None, margin: float) -> Pace | None:
    return None if rate_per_s is None else Pace(rate_per_s * (1.0 - margin))


def by_quota(specs: Sequence[QuotaSpec]) -> dict[str, QuotaState]:
    """Return the account of each quota. The limits of an account are those of the first of its quotas that has any."""
    accounts: dict[str, QuotaState] = {}
    for spec in sorted(specs, key=lambda spec: not spec.limits):  # stable: those with limits first
        accounts.setdefault(spec.account or spec.name, QuotaState(spec))
    return {spec.name: accounts[spec.account or spec.name] for spec in specs}


def clash(specs: Sequence[QuotaSpec]) -> tuple[str, str] | None:
    """Return the first quota that cannot share its account, and why; None where all can."""
    known: dict[str, QuotaSpec] = {}
    for spec in specs:
        if spec.limits:
            first = known.setdefault(spec.account or spec.name, spec)
            if replace(first, name="", account=None, usage_header=None, extra={}) != replace(
                spec, name="", account=None, usage_header=None, extra={}
            ):
                return spec.name, f"account {spec.account!r} has other limits in quota {first.name!r}"
    for spec in specs:
        if not spec.limits and (spec.account is None or spec.account not in known):
            return spec.name, "must limit something: give rate_per_s, concurrency or tokens_per_min, or the account of a quota that does"
    return None
