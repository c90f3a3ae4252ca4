"""What shares say about the cores of one node: what is kept free for whom, and who may take from whom.

A job that holds more than its share is not to have what others are entitled to, and want.

1. *Kept.* Where it would start or grow, it leaves free what jobs within their share want for their running actions to grow, now,
   and for those that they will start, soon. The second is not known; it is taken to be what they have used at peak lately.
2. *Claims.* What it holds beyond the smallest amounts of its actions, jobs within their share may take for theirs to grow,
   whatever it is worth to either.
3. *Spared.* What would give a job more than it is entitled to is taken from none that would then have less than that, even if
   it is worth more to the first, and none claims more than would give it just that: what is claimed does not go to and fro.

Nobody may claim, or has kept for him, more of a node than his share of it.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Final

from scheduler.lanes.look import Look
from scheduler.model import Waiting
from scheduler.policies.elastic import Elastic
from scheduler.resources.cpu import CoreGroup
from scheduler.resources.ladder import Climber, Rung
from scheduler.state import State
from tangram.action import CORES

MANY_JOBS: Final = 32
MANY_JOBS_S: Final = 1.0
"""With more jobs than that on a node, what is kept for them is worked out once in so many seconds, not at each look."""


class Claims:
    """What jobs leave free, may take, and may not."""

    def __init__(self, state: State, policy: Elastic) -> None:
        self._state = state
        self._policy = policy

    def kept(self, look: Look, waiting: Waiting, units: int) -> int:
        """Return the cores that an action of a job beyond its share leaves free when it takes some units.

        But nothing where the job holds less than its own part of this node, so that what is kept for some starves nobody.
        """
        group, job = look.group, waiting.action.job
        own = self._entitled(group, job)
        if self._used(look, job) + units <= max(own, waiting.least):
            return 0
        if look.kept is None:
            look.kept = self._kept_for_others(look)
        return math.floor(min(look.kept, group.capacity - own))

    def kept_back(self, look: Look, climber: Climber) -> set[str]:
        """Return the job of an action that may not grow, and those that then may not either: many are not to be asked one by one."""
        group = look.group
        others = {
            job
            for job in group.ladder.wanted_by_job
            if self._state.shares.over(job) and (not look.free or self._used(look, job) >= self._entitled(group, job))
        }
        return others | {climber.waiting.action.job}

    def claimable(self, look: Look) -> int:
        """Return the extra units of jobs beyond their share."""
        if not (look.contended and self._policy.shrinks):
            return 0
        return sum(units for job, units in look.group.ladder.extra_by_job.items() if self._state.shares.over(job))

    def may_claim(self, look: Look, climber: Climber, rung: Rung) -> bool:
        """Say whether jobs beyond their share have the units for a rung, and the climber's job is entitled to them."""
        claimable, job = self.claimable(look), climber.waiting.action.job
        if not claimable or look.free + claimable < rung.price:
            return False
        return self._used(look, job) + rung.price <= self._entitled(look.group, job) and not self._exceeds(job, rung.price)

    def spared(self, look: Look, climber: Climber, rung: Rung) -> Collection[str]:
        """Return the jobs from which an action may take nothing for what it is worth."""
        job = climber.waiting.action.job
        if not (look.contended and self._exceeds(job, rung.price)):
            return ()
        return {other for other in look.group.ladder.extra_by_job if other != job and self._lacks_without(look.group, other)}

    def takes_from_few(self, look: Look, climber: Climber, rung: Rung) -> bool:
        """Say whether none of a job's actions may grow where nothing is free, though those of others may."""
        return not look.free and self._exceeds(climber.waiting.action.job, 1) and bool(self.spared(look, climber, rung))

    def _exceeds(self, job: str, units: int) -> bool:
        """Say whether a job would hold more than it is entitled to with some more cores."""
        shares = self._state.shares
        return shares.with_more(job, CORES, units) > shares.entitlement(job)

    def _lacks_without(self, group: CoreGroup, job: str) -> bool:
        """Say whether a job would hold less than it is entitled to without the units that it misses least."""
        shares, last = self._state.shares, group.ladder.first_down(job)
        return last is None or shares.with_more(job, CORES, -last.rungs[last.at - 1].price) < shares.entitlement(job)

    def _used(self, look: Look, job: str) -> float:
        return look.group.used_by(job) + look.taken.get(job, 0)

    def _entitled(self, group: CoreGroup, job: str) -> float:
        return self._state.shares.entitlement(job) * group.capacity

    def _kept_for_others(self, look: Look) -> float:
        """Return what jobs within their share, and present, want or have used at peak, as far as entitled, and do not use now."""
        group, shares, kept = look.group, self._state.shares, 0.0
        if len(group.peaks) > MANY_JOBS and look.now < group.kept_until:
            return group.kept
        group.forget_peaks(look.now)
        for job in {**group.peaks, **group.ladder.wanted_by_job}:
            if shares.present(job) and not shares.over(job):
                entitled, used = self._entitled(group, job), self._used(look, job)
                most = max(group.peak_of(job, look.now), used + self._wanted(group, job, entitled - used))
                kept += max(0.0, min(most, entitled) - used)
        group.kept, group.kept_until = kept, look.now + MANY_JOBS_S
        return kept

    def _wanted(self, group: CoreGroup, job: str, left: float) -> int:
        """Return the units that a job's running actions want; none where not even the first of them may have its next ones."""
        first = group.ladder.first_up(job)
        return 0 if first is None or first.rungs[first.at].price > left else group.ladder.wanted_by_job.get(job, 0)
