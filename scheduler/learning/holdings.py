"""What environments come to hold of memory, and what an action adds to that, learned for each job. MB throughout.

*Headroom* is the memory that nine of ten actions do not exceed beyond what their environment holds when they start. The first action of
an environment is a class of its own: it starts the programs that stay.

A *peak* is the most that an environment has held between its actions. The peaks of ended environments are known. A running environment
has at least the peak that it has reached, and is expected to reach `GROWTH` times as much. So there is an estimate as soon as a few
first actions have ended, and it is not misled when only small environments have ended yet.

Only numbers live here: no clock, no environment.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final, Literal

Stage = Literal["open", "first", "later"]

UNKNOWN_MB: Final = 64
"""Headroom before anything is known."""

QUANTILE: Final = 0.9
"""Part of the actions that never ask for more than their headroom."""

STEP: Final = 0.1
"""Part by which an action moves a headroom. The headroom rises by the part times the quantile, and falls by the rest."""

KNOWN: Final = 3
"""Environments of a job whose first actions have ended, from which on the job's peaks are expected. Before that, their limit is."""

GROWTH: Final = 1.25
"""Expected peak of a running environment, as a multiple of its peak so far."""

PRIOR: Final = 3.0
"""Ended environments that the expectation from running environments counts for."""

MOST_JOBS: Final = 1000
"""Most jobs that are known without running environments. The oldest are dropped first."""

MOST: Final = 500.0
"""Ended environments that count at most. Older ones fade."""


@dataclass(slots=True)
class _Job:
    headroom_mb: dict[Stage, float] = field(default_factory=dict)
    running: int = 0
    running_mb: float = 0.0
    ended: float = 0.0
    ended_mb: float = 0.0
    ended_squares: float = 0.0


class Holdings:
    """The holdings and growths by job."""

    def __init__(self) -> None:
        self._jobs: dict[str, _Job] = {}

    def _of(self, job: str) -> _Job:
        known = self._jobs.get(job)
        if known is None:
            if len(self._jobs) >= MOST_JOBS:
                # What runs is counted off at its end.
                oldest = next((name for name, other in self._jobs.items() if not other.running), None)
                if oldest is not None:
                    del self._jobs[oldest]
            known = self._jobs[job] = _Job()
        return known

    def headroom_mb(self, job: str, stage: Stage) -> int:
        """Return the memory that an action is granted beyond what its environment holds."""
        known = self._jobs.get(job)
        return math.ceil(known.headroom_mb.get(stage, UNKNOWN_MB)) if known is not None else UNKNOWN_MB

    def grew(self, job: str, stage: Stage, growth_mb: int) -> None:
        """Take in how far an action went beyond what its environment held."""
        headroom_mb = self._of(job).headroom_mb
        before_mb = headroom_mb.get(stage)
        if before_mb is None:
            headroom_mb[stage] = float(growth_mb)
        elif growth_mb > before_mb:
            headroom_mb[stage] = before_mb + max(1.0, before_mb) * STEP * QUANTILE
        else:
            headroom_mb[stage] = before_mb - before_mb * STEP * (1 - QUANTILE)

    def peaked(self, job: str, before_mb: int | None, peak_mb: int) -> None:
        """Take in that a running environment has a higher peak; `before_mb` is None at the end of its first action."""
        known = self._of(job)
        known.running += before_mb is None
        known.running_mb += peak_mb - (before_mb or 0)

    def ended(self, job: str, peak_mb: int, *, counts: bool) -> None:
        """Take in that a running environment has ended. One that was cut short does not count as an end."""
        known = self._jobs[job]
        known.running -= 1
        known.running_mb -= peak_mb
        if counts:
            keeps = min(1.0, MOST / (known.ended + 1.0))
            known.ended = (known.ended + 1.0) * keeps
            known.ended_mb = (known.ended_mb + peak_mb) * keeps
            known.ended_squares = (known.ended_squares + peak_mb**2) * keeps

    def expected_mb(self, job: str) -> tuple[float, float] | None:
        """Return the mean and the variance of the peak that an environment of a job will reach; None while too little is known."""
        known = self._jobs.get(job)
        if known is None or known.running + known.ended < KNOWN:
            return None
        prior_mb = GROWTH * known.running_mb / known.running if known.running else known.ended_mb / known.ended
        count = known.ended + PRIOR
        mean_mb = (known.ended_mb + PRIOR * prior_mb) / count
        squares = (known.ended_squares + PRIOR * prior_mb**2 * (1 + (GROWTH - 1) ** 2)) / count
        return mean_mb, max(0.0, squares - mean_mb**2)
