"""Quotas as a condition of starting: who is kept back by one, and who is looked at again when it opens."""

from __future__ import annotations

from scheduler.core.state import State
from scheduler.cpu.cores import CoreGroup
from scheduler.gpu.cells import CellGroup
from scheduler.model import Waiting
from scheduler.quotas.account import QuotaState

Place = CoreGroup | CellGroup | QuotaState
"""Where an action waits that a quota keeps back."""


class Holds:
    """Takes from quotas, and remembers which places wait for which."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._by_quota: dict[QuotaState, dict[Place, int]] = {}

    def held(self, waiting: Waiting, place: Place, now: float) -> bool:
        """Say whether a quota keeps the action back; if so, the place is looked at again when it opens."""
        for quota, requests, _ in self._state.draws(waiting.action):
            if quota.opens_at(now, requests, _lead_s(quota, place)) != now:
                held = self._by_quota.setdefault(quota, {})
                held[place] = min(requests, held.get(place, requests))
                return True
        return False

    def opens(self, quota: QuotaState, now: float) -> bool:
        """Say whether a quota has room for one request of those that wait in its own queue."""
        return quota.opens_at(now, 1, quota.spec.lead_s) == now

    def take(self, waiting: Waiting, now: float) -> float:
        """Take the requests of an action that starts; return when they may go."""
        draws = self._state.draws(waiting.action)
        at = max((quota.goes_at(now, requests) for quota, requests, _ in draws), default=now)
        for quota, requests, tokens in draws:
            quota.take(at, requests, tokens)
        return at

    def next_opening(self, now: float) -> float | None:
        """Return when the next quota with waiting actions opens; None where none does by itself."""
        return min((at for at in (self._opens_at(quota, now) for quota in self._by_quota) if at is not None), default=None)

    def open(self, now: float) -> None:
        """Mark what may go on because a rate has opened."""
        for quota in [quota for quota in self._by_quota if self._opens_at(quota, now) == now]:
            for place in self._by_quota.pop(quota):
                self._state.touch(place)

    def forget(self, place: Place) -> None:
        """Look no more at a place that is gone."""
        for held in self._by_quota.values():
            held.pop(place, None)
        self._by_quota = {quota: held for quota, held in self._by_quota.items() if held}

    def _opens_at(self, quota: QuotaState, now: float) -> float | None:
        """Return when the quota has room for the least of what it keeps back."""
        held = self._by_quota[quota]
        return quota.opens_at(now, min(held.values()), max(_lead_s(quota, place) for place in held))


def _lead_s(quota: QuotaState, place: Place) -> float:
    """Return how much ahead of its time a request may be granted: only its own worker knows how to wait for it."""
    return quota.spec.lead_s if isinstance(place, QuotaState) else 0.0
