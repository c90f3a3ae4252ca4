"""Means and percentiles of a list of numbers: the one definition that status, report and replay share.

A percentile is linear interpolation between the two nearest ranks, as in numpy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, quantiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """How a list of numbers is spread; all 0 where the list is empty (`count` tells)."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean; 0 for no values."""
    return fmean(values) if values else 0.0


def summary(values: Iterable[float]) -> Summary:
    """Summarise `values`, in any order."""
    ordered = sorted(values)
    if not ordered:
        return Summary(count=0, mean=0.0, p50=0.0, p95=0.0, p99=0.0)
    cuts = quantiles(ordered if len(ordered) > 1 else 2 * ordered, n=100, method="inclusive")
    return Summary(count=len(ordered), mean=mean(ordered), p50=cuts[49], p95=cuts[94], p99=cuts[98])
