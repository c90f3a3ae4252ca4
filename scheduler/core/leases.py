"""Leases: an open environment that nobody has used for `Limits.lease_s` is to be closed.

An environment has one entry, which is put off only when it comes up: what was used since has longer, what is in use has all of its time
from now on.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from scheduler.model import Environment
from scheduler.model.state import State


class Leases:
    """Says which environments are unused for too long."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._lease_s = state.limits.lease_s
        self._due: list[tuple[float, int, Environment]] = []
        self._count = 0

    def begin(self, environment: Environment) -> None:
        """Note when the lease of an environment that has just opened is over, should nobody use it until then."""
        if self._lease_s is not None:
            self._count += 1
            heapq.heappush(self._due, (environment.last_used + self._lease_s, self._count, environment))

    def next_end(self, now: float) -> float | None:
        """Return when the next unused environment's lease is over; None where there are no leases."""
        while self._due:
            due, number, environment = self._due[0]
            if environment.state != "open" or self._state.environments.get(environment.id) is not environment:
                heapq.heappop(self._due)
                continue
            used = now if environment.actions else environment.last_used
            later = used + (self._lease_s or 0.0)
            if due > now or later <= due:
                return due
            heapq.heapreplace(self._due, (later, number, environment))
        return None

    def over(self, now: float) -> Iterator[Environment]:
        """Give the environments whose lease is over, one after another; each must be closed before the next one is asked for."""
        while (due := self.next_end(now)) is not None and due <= now:
            yield self._due[0][2]
