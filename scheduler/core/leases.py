"""Leases: when an open environment is to be closed.

| lease | it ends |
|---|---|
| the environment's own: its open named it, or it was renewed | `lease_s` after it stood, or after the last renewal, in use or not |
| the system's, `Limits.lease_s`, of all others | `lease_s` after its last use; in use, the time starts anew |

One entry of each environment counts. It is put off only when it comes up. An environment gets another entry if its lease now ends
earlier.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Final

from scheduler.model import Environment
from scheduler.model.state import State

RENEWALS_S: Final = 10.0
"""Least time that an environment has left when a scheduler takes over. Renewals that were sent meanwhile must arrive first."""


class Leases:
    """Says which environments are to be closed since their lease is over."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._lease_s = state.limits.lease_s
        self._due: list[tuple[float, int, Environment]] = []
        self._count = 0
        self._entries: dict[str, tuple[float, int, Environment]] = {}
        """The entry that counts, by environment."""

    def resume(self, environment: Environment, now: float) -> None:
        """Go on with the lease of an environment that an earlier scheduler has opened."""
        if environment.ends_at is not None:
            environment.ends_at = max(environment.ends_at, now + RENEWALS_S)
        self.begin(environment, now)

    def begin(self, environment: Environment, now: float) -> None:
        """Note when the lease of a standing environment is over."""
        if environment.lease_s is not None and environment.ends_at is None:
            environment.ends_at = now + environment.lease_s
        self._enter(environment, now)

    def renew(self, environment: Environment, lease_s: float, now: float) -> None:
        """Let the lease of an environment end `lease_s` from now, or from its opening if it does not stand yet."""
        environment.lease_s = lease_s
        if environment.state == "open":
            environment.ends_at = now + lease_s
            self._enter(environment, now)

    def noted_end(self, environment: Environment) -> float | None:
        """Return the end of an environment's own lease for the journal.

        Before the environment stands, the lease counts from its last use.
        """
        if environment.ends_at is None and environment.lease_s is not None:
            return environment.last_used + environment.lease_s
        return environment.ends_at

    def _enter(self, environment: Environment, now: float) -> None:
        ends_at, known = self._end_of(environment, now), self._entries.get(environment.id)
        if ends_at is not None and (known is None or known[2] is not environment or ends_at < known[0]):
            self._count += 1
            self._entries[environment.id] = entry = (ends_at, self._count, environment)
            heapq.heappush(self._due, entry)

    def _end_of(self, environment: Environment, now: float) -> float | None:
        """Return when the lease of an environment is over without further use or renewal; None without a lease."""
        if environment.ends_at is not None or self._lease_s is None:
            return environment.ends_at
        return (now if environment.actions else environment.last_used) + self._lease_s

    def why(self, environment: Environment) -> str:
        """Return the reason to close an environment whose lease is over."""
        return "its lease is over" if environment.ends_at is not None else f"unused for {self._lease_s:g} s"

    def next_end(self, now: float) -> float | None:
        """Return when the next lease is over; None without leases."""
        while self._due:
            entry = due, number, environment = self._due[0]
            if self._entries.get(environment.id) is not entry:
                heapq.heappop(self._due)
                continue
            later = self._end_of(environment, now)
            if environment.state != "open" or self._state.environments.get(environment.id) is not environment or later is None:
                heapq.heappop(self._due)
                del self._entries[environment.id]
                continue
            if due > now or later <= due:
                return due
            self._entries[environment.id] = entry = (later, number, environment)
            heapq.heapreplace(self._due, entry)
        return None

    def over(self, now: float) -> Iterator[Environment]:
        """Yield the environments whose lease is over. The caller must close each before it takes the next."""
        while (due := self.next_end(now)) is not None and due <= now:
            yield self._due[0][2]
