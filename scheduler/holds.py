"""Quotas as a condition of starting: who is kept back by one, and who is looked at again when it opens."""

from __future__ import annotations

from scheduler.model import Waiting
from scheduler.resources.cpu import CoreGroup
from scheduler.resources.gpu import CellGroup
from scheduler.resources.quota import QuotaState
from scheduler.state import State
from tangram.action import QUOTA_PREFIX

Place = CoreGroup | CellGroup | QuotaState
"""Where an action waits that a quota keeps back."""


class Holds:
    """Takes from quotas, and remembers which places wait for which."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._by_quota: dict[str, dict[Place, int]] = {}

    def held(self, waiting: Waiting, place: Place, now: float) -> bool:
        """Say whether a quota keeps the action back; if so, the place is looked at again when it opens."""
        for name in waiting.action.cost.quotas:
            requests = requests_of(waiting, name)
            if self._state.quotas[name].opens_at(now, requests) != now:
                held = self._by_quota.setdefault(name, {})
                held[place] = min(requests, held.get(place, requests))
                return True
        return False

    def take(self, waiting: Waiting, now: float) -> None:
        """Take the requests of an action that starts."""
        for name in waiting.action.cost.quotas:
            self._state.quotas[name].take(now, requests_of(waiting, name))

    def next_opening(self, now: float) -> float | None:
        """Return when the next quota with waiting actions opens; None where none does by itself."""
        return min((at for at in (self._opens_at(name, now) for name in self._by_quota) if at is not None), default=None)

    def open(self, now: float) -> None:
        """Mark what may go on because a rate has opened."""
        for name in [name for name in self._by_quota if self._opens_at(name, now) == now]:
            for place in self._by_quota.pop(name):
                self._state.touch(place)

    def forget(self, place: Place) -> None:
        """Look no more at a place that is gone."""
        for held in self._by_quota.values():
            held.pop(place, None)
        self._by_quota = {name: held for name, held in self._by_quota.items() if held}

    def _opens_at(self, name: str, now: float) -> float | None:
        """Return when the quota has room for the least of what it keeps back."""
        return self._state.quotas[name].opens_at(now, min(self._by_quota[name].values()))


def requests_of(waiting: Waiting, quota: str) -> int:
    """Return the requests that an action makes of a quota."""
    return waiting.action.cost.least(f"{QUOTA_PREFIX}{quota}")
