"""Fairness between jobs on the cores of one node: which job comes last, and which may take units from which.

A job is *beyond its share* while it holds more than 1.05 times its entitlement (`scheduler/model/shares.py`). Its actions come
after the actions of all other jobs, whatever their expected work. The job may use units that no other job wants. Other jobs may
take these back at any moment.

A job may not push another below its entitlement in order to exceed its own. For its actions to grow, a job takes units from jobs
beyond their share only up to its own entitlement. This prevents oscillation.
"""

from __future__ import annotations

from scheduler.model.shares import Shares
from tangram.action import CORES


class Fairness:
    """The rules of shares in one round. With `counts` False, or only one active job, no rule applies."""

    def __init__(self, shares: Shares, *, counts: bool) -> None:
        self._shares = shares
        self.contended = counts and shares.contended

    def deprioritised(self, job: str) -> bool:
        """Say whether a job is beyond its share."""
        return self.contended and self._shares.over(job)

    def may_take(self, job: str, units: int, other: str, loss: int) -> bool:
        """Say whether a job may have `units` more if the job `other` then loses `loss` units."""
        if not self.contended or job == other:
            return True
        shares = self._shares
        exceeds = shares.with_more(job, CORES, units) > shares.entitlement(job)
        return not (exceeds and shares.with_more(other, CORES, -loss) < shares.entitlement(other))

    def entitled(self, job: str, units: int) -> bool:
        """Say whether a job may take `units` from jobs beyond their share: with them it stays within its entitlement."""
        shares = self._shares
        return self.contended and shares.with_more(job, CORES, units) <= shares.entitlement(job)
