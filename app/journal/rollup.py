"""Figures by the hour of what retention removes from the journal: made of rows here, and read again by `app/journal/figures.py`.

An hour is that of submission, or of creation for environments, in seconds since the epoch. The histograms are logarithmic, with
`BINS_PER_OCTAVE` bins each time that seconds double, so that a percentile is right to about 2 %; counts, sums and means are exact.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final, Self

from app.journal.models import AnyRow
from scheduler.model.stats import Summary, mean, summary
from tangram.action import CELLS, CORES

HOUR_S: Final = 3600
PARTS: Final = ("act_s", "queue_s", "background_s", "overhead_s", "execution_s")
BINS_PER_OCTAVE: Final = 16
SUMS: Final = (*PARTS, "cpu_s", "core_s", "cell_s")
SMALLEST_S: Final = 1e-4
"""Upper edge of bin 0; what is shorter counts as nothing."""

Key = tuple[str, str, str, int, str]


def hour_of(at: float) -> int:
    """Return the hour in which a time lies."""
    return int(at // HOUR_S) * HOUR_S


def bin_of(seconds: float) -> int:
    """Return the bin of the histograms in which a duration lies."""
    return 0 if seconds <= SMALLEST_S else 1 + math.floor(BINS_PER_OCTAVE * math.log2(seconds / SMALLEST_S))


def seconds_of(number: int) -> float:
    """Return the middle of a bin."""
    return 0.0 if number == 0 else SMALLEST_S * 2.0 ** ((number - 0.5) / BINS_PER_OCTAVE)


@dataclass(slots=True)
class ActionFigures:
    """Figures of ended actions: the values of a row of `action_hours`, beside its key."""

    actions: int = 0
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SUMS, 0.0))
    histograms: dict[str, Counter[int]] = field(default_factory=lambda: {part: Counter() for part in PARTS})
    causes: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of_row(cls, row: AnyRow) -> Self:
        """Return the figures of a row of `action_hours`."""
        figures = cls(actions=row.actions, sums={name: getattr(row, name) for name in SUMS})
        for part, bins in row.histograms.items():
            figures.histograms[part].update({int(number): count for number, count in bins.items()})
        figures.causes.update(row.causes)
        return figures

    def add_action(self, row: AnyRow) -> None:
        """Count an ended action, a row of `actions` with the `resource` that its last grant counted in."""
        self.actions += 1
        if row.fault:
            self.causes[row.cause] += 1
        for part in PARTS:
            seconds = getattr(row, part) or 0.0
            self.sums[part] += seconds
            self.histograms[part][bin_of(seconds)] += 1
        self.sums["cpu_s"] += row.cpu_s or 0.0
        if row.resource in (CORES, CELLS):
            self.sums["core_s" if row.resource == CORES else "cell_s"] += row.unit_s or 0.0

    def merge(self, other: ActionFigures) -> None:
        """Count what another has counted, too."""
        self.actions += other.actions
        for name, seconds in other.sums.items():
            self.sums[name] += seconds
        for part, bins in other.histograms.items():
            self.histograms[part].update(bins)
        self.causes.update(other.causes)

    def values(self) -> dict[str, Any]:
        """Return the columns of a row."""
        histograms = {part: {str(number): count for number, count in sorted(bins.items())} for part, bins in self.histograms.items()}
        return {"actions": self.actions, **self.sums, "histograms": histograms, "causes": dict(sorted(self.causes.items()))}


def by_hour(rows: Iterable[AnyRow]) -> dict[Key, ActionFigures]:
    """Return the figures of ended actions by job, kind, class, hour and end."""
    found: dict[Key, ActionFigures] = {}
    for row in rows:
        key = (row.job, row.kind, row.action_class, hour_of(row.submitted_at), row.status)
        found.setdefault(key, ActionFigures()).add_action(row)
    return found


def merged_mean(values: Sequence[float], figures: ActionFigures, part: str) -> float:
    """Return the mean of values and of what was rolled up; 0 for nothing."""
    count = len(values) + figures.actions
    return (math.fsum(values) + figures.sums[part]) / count if figures.actions else mean(values)


def merged_summary(values: Sequence[float], figures: ActionFigures, part: str) -> Summary:
    """Summarise values together with what was rolled up, which counts as in the middle of its bins."""
    if not figures.actions:
        return summary(values)
    counts = Counter(values)
    for number, count in figures.histograms[part].items():
        counts[seconds_of(number)] += count
    return Summary(
        count=counts.total(),
        mean=merged_mean(values, figures, part),
        p50=_percentile(counts, 50),
        p95=_percentile(counts, 95),
        p99=_percentile(counts, 99),
    )


def _percentile(counts: Mapping[float, int], q: float) -> float:
    """Return a percentile as `scheduler.model.stats.summary` gives it, of each value so often."""
    ordered = sorted(counts)
    until = list(accumulate(counts[value] for value in ordered))
    rank = (until[-1] - 1) * q / 100
    below = math.floor(rank)
    low = ordered[bisect_right(until, below)]
    high = ordered[bisect_right(until, min(below + 1, until[-1] - 1))]
    return low + (high - low) * (rank - below)
