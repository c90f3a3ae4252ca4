"""Which job holds more than its share: weighted dominant-resource fairness (Ghodsi et al., NSDI 2011).

A job's *dominant share* is the largest of its parts of the system's cores, GPU cells and concurrent requests. Its *entitlement* is
its weight over the weights of all active jobs. A job is active while an action of it waits or runs. A job may hold more while no
other job wants the resource. Once another job does, the actions of jobs within their entitlement go first.

Units that a job holds beyond its share are the first to be taken from running actions (`cpu/fairness.py`).

Memory and start slots of environments follow the same rule, in their own books (`Environments.shares`). An environment holds its
memory for as long as it stands, and never loses any of it. So memory decides which job opens the next environment, and not which
job gets cores.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

from scheduler.model.events import Holdings
from tangram.wire import WireHoldings

DEFAULT_WEIGHT = 1.0

TOLERANCE = 1.05
"""How many times its entitlement a job may hold before the others go first. Shares that differ by a single core then change
nothing."""


class Shares:
    """The active jobs, and how much each holds of the offered resources: `cores`, `cells` and `quota:<name>`, or memory and start slots.

    Integer amounts stay exact. They must, since nodes with bounded and with unlimited memory are added up.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._actions: dict[str, int] = {}
        self._held: dict[str, dict[str, float]] = {}
        self._offered: dict[str, float] = {}
        self._dominant: dict[str, tuple[float, str]] = {}
        """The known dominant shares, each with its resource. A change of a job's units removes its entry."""
        self._active_weight = 0.0
        self._elsewhere = Holdings()
        """What other shards offer, and their jobs hold there. It is counted in all above."""

    @property
    def contended(self) -> bool:
        """Whether there is more than one active job."""
        return len(self._actions) > 1

    def active(self) -> Iterator[str]:
        """Return the jobs that have actions, in the order in which they came."""
        return iter(self._actions)

    def set_elsewhere(self, now: Holdings) -> None:
        """Count what other shards offer and jobs hold there, in place of what was told before. Each such job counts as one action."""
        before, self._elsewhere = self._elsewhere, now
        for sign, told in ((1, now), (-1, before)):  # a job that stays active keeps its place among the others
            for resource, amount in told.offered.items():
                self.offer(resource, sign * amount)
            for job, amounts in told.held.items():
                if sign > 0:
                    self.enter(job)
                for resource, amount in amounts.items():
                    self.hold(job, resource, sign * amount)
                if sign < 0:
                    self.leave(job)

    def own(self, most_jobs: int) -> WireHoldings:
        """Return what is offered and held without what is elsewhere, of the first jobs that are active here."""
        there = self._elsewhere
        offered = {resource: int(amount) - there.offered.get(resource, 0) for resource, amount in self._offered.items()}
        active = (job for job, count in self._actions.items() if count > (job in there.held))
        held = {}
        for job in islice(active, most_jobs):
            elsewhere = there.held.get(job, {})
            held[job] = {name: int(amount) - elsewhere.get(name, 0) for name, amount in self._held.get(job, {}).items()}
        return {"offered": offered, "held": held}

    def offer(self, resource: str, amount: float) -> None:
        """Count units that were added; negative for units that were removed."""
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
        """Count units that a job was granted; negative for units that it gave back."""
        held = self._held.setdefault(job, {})
        held[resource] = held.get(resource, 0) + amount
        self._dominant.pop(job, None)

    def over(self, job: str) -> bool:
        """Say whether a job holds more than it is entitled to while others are active."""
        if len(self._actions) < 2:
            return False
        return self.dominant(job) >= self.tolerated(job)

    def exceeds(self, job: str, resource: str, amount: float) -> bool:
        """Say whether a job that holds a resource would exceed its entitlement with `amount` more of it."""
        held, offered = self._held.get(job, {}).get(resource, 0), self._offered.get(resource, 0)
        return held > 0 and offered > 0 and (held + amount) / offered > self.tolerated(job)

    def tolerated(self, job: str) -> float:
        """Return the dominant share from which on a job is beyond its share."""
        return TOLERANCE * self.entitlement(job)

    def dominant(self, job: str) -> float:
        """Return the job's dominant share, from 0 to 1."""
        return self.dominant_of(job)[0]

    def dominant_of(self, job: str) -> tuple[float, str]:
        """Return the job's dominant share, and the resource that it is a share of; "" where the job holds nothing."""
        held = self._held.get(job)
        if not held:
            return 0.0, ""
        known = self._dominant.get(job)
        if known is None:
            parts = (
                (amount / self._offered[name], name) for name, amount in held.items() if amount > 0 and self._offered.get(name, 0.0) > 0
            )
            known = self._dominant[job] = max(parts, default=(0.0, ""))
        return known

    def with_more(self, job: str, resource: str, amount: float) -> float:
        """Return what the job's dominant share would be with `amount` more units of a resource; fewer when negative."""
        held = {**self._held.get(job, {})}
        held[resource] = held.get(resource, 0.0) + amount
        return max((part / self._offered[name] for name, part in held.items() if self._offered.get(name, 0.0) > 0), default=0.0)

    def entitlement(self, job: str) -> float:
        """Return the part of the system that is the job's when all active jobs want theirs."""
        return self._weight(job) / self._active_weight if self._active_weight else 1.0

    def _weight(self, job: str) -> float:
        return self._weights.get(job, DEFAULT_WEIGHT)
