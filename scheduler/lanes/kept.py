"""The cores that are kept free on a node for jobs that hold less than their share."""

from __future__ import annotations

from typing import Final

from scheduler.resources.cpu import CoreGroup
from scheduler.shares import Shares

MANY_JOBS: Final = 32
MANY_JOBS_S: Final = 1.0
"""With more jobs than that on a node, what is kept for them is worked out once in so many seconds, not at each look."""


def kept_for_others(shares: Shares, group: CoreGroup, now: float) -> float:
    """Return the cores that jobs within their share, and present, have used at peak as far as entitled, and do not use now."""
    if len(group.peaks) > MANY_JOBS and now < group.kept_until:
        return group.kept
    group.forget_peaks(now)
    within = [(job, peak) for job, peak in group.peaks.items() if shares.present(job) and not shares.over(job)]
    unused = (min(peak.most(now), shares.entitlement(job) * group.capacity) - peak.used for job, peak in within)
    group.kept, group.kept_until = sum(max(0.0, cores) for cores in unused), now + MANY_JOBS_S
    return group.kept
