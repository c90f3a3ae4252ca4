"""Fairness between jobs on the cores of one node: whose actions come last, and who may take cores from whom.

A job is *beyond its share* while it holds more than 1.05 times its entitlement (`scheduler/shares.py`). Its actions come after
those of all other jobs, whatever is expected of them. It may use what nobody else wants. Others may take it back at any moment.

A job may not push another below its entitlement in order to exceed its own. And a job claims cores for actions to grow only up to
its entitlement, and only from jobs beyond their share, which keep what they are entitled to. So cores do not go to and fro.
"""

from __future__ import annotations

from typing import Final

from scheduler.model import Waiting
from scheduler.resources.foreground import Holder
from scheduler.shares import Shares
from tangram.action import CORES

BETTER: Final = 1.2
"""How many times less work must be expected of an action for it to take the cores of another one."""


class Fairness:
    """What shares and priorities say in one round; with `counts` False, or one job, only priorities do."""

    def __init__(self, shares: Shares, *, counts: bool) -> None:
        self._shares = shares
        self.contended = counts and shares.contended
        self._began_last: dict[str, bool] = {}

    def comes_last(self, job: str) -> bool:
        """Say whether a job is beyond its share."""
        return self.contended and self._shares.over(job)

    def may_take(self, waiting: Waiting, left_s: float, holder: Holder, lost: int = 0) -> bool:
        """Say whether an action may take the cores of a holder, of which more work is expected, or whose job comes last."""
        job, other = waiting.action.job, holder.job
        if self.contended and job != other:
            if not self.may_take_units(job, waiting.least, other, lost + holder.running.units):
                return False
            if self.comes_last(other) and not self.comes_last(job):
                return True
        if waiting.action.priority != holder.priority:
            return waiting.action.priority > holder.priority
        return left_s * BETTER < holder.left_s

    def may_take_units(self, job: str, units: int, other: str, loss: int) -> bool:
        """Say whether a job may have some more units if another one then loses `loss` of its own."""
        if not self.contended or job == other:
            return True
        if self.comes_last(job) and not self.comes_last(other):
            return False
        shares = self._shares
        exceeds = shares.with_more(job, CORES, units) > shares.entitlement(job)
        return not (exceeds and shares.with_more(other, CORES, -loss) < shares.entitlement(other))

    def gives_up(self, job: str, loss: int) -> bool:
        """Say whether a job that began this round beyond its share can lose some units and still have what it is entitled to."""
        if not self.contended:
            return False
        began_last = self._began_last.setdefault(job, self._shares.over(job))
        return began_last and self._shares.with_more(job, CORES, -loss) >= self._shares.entitlement(job)

    def may_claim(self, job: str, units: int) -> bool:
        """Say whether a job is entitled to some more units, to be taken from those beyond their share."""
        shares = self._shares
        return self.contended and shares.with_more(job, CORES, units) <= shares.entitlement(job)
