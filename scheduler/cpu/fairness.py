"""Fairness between jobs on the cores of one node: which job comes last, and which may take units from which.

A job is *beyond its share* while it holds more than 1.05 times its entitlement (`scheduler/model/shares.py`). Its actions come after
those of all other jobs, whatever is expected of them. It may use what nobody else wants. Others may take it back at any moment.

A job may not push another below its entitlement in order to exceed its own. And for actions to grow, it takes units from jobs
beyond their share only up to its own entitlement. This prevents oscillation.
"""

from __future__ import annotations

from scheduler.model.shares import Shares
from tangram.action import CORES


class Fairness:
    """What shares say in one round; with `counts` False, or one job, they say nothing."""

    def __init__(self, shares: Shares, *, counts: bool) -> None:
        self._shares = shares
        self.contended = counts and shares.contended

    def deprioritised(self, job: str) -> bool:
        """Say whether a job is beyond its share."""
        return self.contended and self._shares.over(job)

    def may_take(self, job: str, units: int, other: str, loss: int) -> bool:
        """Say whether a job may have some more units if another one then loses `loss` of its own."""
        if not self.contended or job == other:
            return True
        if self.deprioritised(job) and not self.deprioritised(other):
            return False
        shares = self._shares
        exceeds = shares.with_more(job, CORES, units) > shares.entitlement(job)
        return not (exceeds and shares.with_more(other, CORES, -loss) < shares.entitlement(other))

    def entitled(self, job: str, units: int) -> bool:
        """Say whether a job has a claim to some more units, to be taken from jobs beyond their share."""
        shares = self._shares
        return self.contended and shares.with_more(job, CORES, units) <= shares.entitlement(job)
