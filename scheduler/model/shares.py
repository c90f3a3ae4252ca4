"""Which job holds more than its share: weighted dominant-resource fairness (Ghodsi et al., NSDI 2011).

A job's *dominant share* is the largest of its parts of the system's cores, GPU cells and concurrent requests. Its
*entitlement* is its weight over the weights of all active jobs, those with an action waiting or running. A job may hold
more as long as nobody else wants it; as soon as somebody does, the actions of jobs within their entitlement go first.

What a job holds beyond its share is the first that is taken from running actions (`cpu/fairness.py`).

Memory and start slots of environments follow the same rule, in their own books (`Environments.places`). An environment holds its memory
for as long as it stands, and none is taken from it. So what a job holds of that says who gets the next place, not who gets cores.
"""

from __future__ import annotations

from collections.abc import Mapping

DEFAULT_WEIGHT = 1.0

TOLERANCE = 1.05
"""How many times its entitlement a job may hold before the others go first: some room, so that shares that are equal but for a
core change nothing."""


class Shares:
    """Who is active and who holds how much, of the resources that are offered: `cores`, `cells` and `quota:<name>`, or places.

    Amounts that are offered as integers stay exact: nodes that bound their memory stand beside others that do not.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._actions: dict[str, int] = {}
        self._held: dict[str, dict[str, float]] = {}
        self._offered: dict[str, float] = {}
        self._dominant: dict[str, float] = {}
        """Dominant shares as far as they are known; what changes one forgets it."""
        self._active_weight = 0.0

    @property
    def contended(self) -> bool:
        """Whether there is more than one active job."""
        return len(self._actions) > 1

    def offer(self, resource: str, amount: float) -> None:
        """Count units that have come; negative for those that went."""
        self._offered[resource] = self._offered.get(resource, 0) + amount
        self._dominant.clear()

    def enter(self, job: str) -> None:
        """Count an action that came in."""
        count = self._actions.get(job, 0)
        self._actions[job] = count + 1
        if not count:
            self._active_weight += self._weight(job)

    def leave(self, job: str) -> None:
        """Count an action that has ended."""
        self._actions[job] -= 1
        if not self._actions[job]:
            del self._actions[job]
            self._held.pop(job, None)
            self._dominant.pop(job, None)
            self._active_weight = sum(self._weight(active) for active in self._actions)

    def hold(self, job: str, resource: str, amount: float) -> None:
        """Count units that a job was granted; negative for those it gave back."""
        held = self._held.setdefault(job, {})
        held[resource] = held.get(resource, 0) + amount
        self._dominant.pop(job, None)

    def over(self, job: str) -> bool:
        """Say whether a job holds more than it is entitled to while others are active."""
        if len(self._actions) < 2:
            return False
        return self.dominant(job) >= self.tolerated(job)

    def exceeds(self, job: str, resource: str, amount: float) -> bool:
        """Say whether a job that holds some of a resource would hold more of it than it is entitled to with so much more."""
        held, offered = self._held.get(job, {}).get(resource, 0), self._offered.get(resource, 0)
        return held > 0 and offered > 0 and (held + amount) / offered > self.tolerated(job)

    def tolerated(self, job: str) -> float:
        """Return the share from which on a job holds more than it is entitled to."""
        return TOLERANCE * self.entitlement(job)

    def dominant(self, job: str) -> float:
        """Return the job's dominant share, from 0 to 1."""
        held = self._held.get(job)
        if not held:
            return 0.0
        known = self._dominant.get(job)
        if known is None:
            parts = (amount / self._offered[name] for name, amount in held.items() if self._offered.get(name, 0.0) > 0)
            known = self._dominant[job] = max(parts, default=0.0)
        return known

    def with_more(self, job: str, resource: str, amount: float) -> float:
        """Return what the job's dominant share would be with some more units of a resource, or fewer when negative."""
        held = {**self._held.get(job, {})}
        held[resource] = held.get(resource, 0.0) + amount
        return max((part / self._offered[name] for name, part in held.items() if self._offered.get(name, 0.0) > 0), default=0.0)

    def entitlement(self, job: str) -> float:
        """Return the part of the system that is the job's when all active jobs want theirs."""
        return self._weight(job) / self._active_weight if self._active_weight else 1.0

    def _weight(self, job: str) -> float:
        return self._weights.get(job, DEFAULT_WEIGHT)
