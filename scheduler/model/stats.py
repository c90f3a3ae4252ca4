"""Means and percentiles of a list of numbers: the one definition that status, report and replay share.

Only pure functions of their arguments live here. A percentile is linear interpolation between the two nearest
ranks, numpy's default, so that figures can be checked with numpy but need no numpy to run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """How a list of numbers is spread; all 0 where the list is empty (`count` tells)."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float


def percentile(ordered: Sequence[float], q: float) -> float:
    """Return the `q`-th percentile, 0 <= q <= 100, of values in ascending order.

    Raises
    ------
    ValueError
        When there are no values or q is out of range.

    """
    if not ordered:
        raise ValueError("no percentile of no values")
    if not 0 <= q <= 100:
        raise ValueError(f"a percentile lies between 0 and 100, not at {q}")
    rank = (len(ordered) - 1) * q / 100
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean; 0 for no values."""
    return math.fsum(values) / len(values) if values else 0.0


def summary(values: Iterable[float]) -> Summary:
    """Summarise `values`, in any order."""
    ordered = sorted(values)
    if not ordered:
        return Summary(count=0, mean=0.0, p50=0.0, p95=0.0, p99=0.0)
    p50, p95, p99 = (percentile(ordered, q) for q in (50, 95, 99))
    return Summary(count=len(ordered), mean=mean(ordered), p50=p50, p95=p95, p99=p99)
