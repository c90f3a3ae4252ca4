"""Amounts over time, made of spans: what was held on average in each of equal stretches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.report.subject import Span

Numbers = NDArray[np.float64]

STRETCHES: Final = 300
"""Points of a line over time: about as many as a narrow picture has pixels."""


class Clock(NamedTuple):
    """The time axis of a picture: the time 0, how long it is, and the unit in which it counts."""

    zero: float
    span_s: float
    unit: str
    unit_s: float

    def at(self, times: Numbers) -> Numbers:
        """Return times of the epoch as places on the axis."""
        return (times - self.zero) / self.unit_s


def clock(zero: float, end: float) -> Clock:
    """Return a time axis whose figures stay short."""
    span_s = max(end - zero, 1e-3)
    unit, unit_s = next(((word, size) for word, size in (("s", 1.0), ("min", 60.0), ("h", 3600.0)) if span_s < 600 * size), ("d", 86_400.0))
    return Clock(zero, span_s, unit, unit_s)


def stretches(axis: Clock, count: int = STRETCHES) -> Numbers:
    """Return the edges of `count` equal stretches."""
    return np.linspace(axis.zero, axis.zero + axis.span_s, count + 1)


def middles(edges: Numbers) -> Numbers:
    """Return the middle of each stretch."""
    return (edges[1:] + edges[:-1]) / 2


def held(spans: Iterable[Span], edges: Numbers) -> Numbers:
    """Return the mean amount in each stretch; exact, however short a span is."""
    table = np.array(list(spans), dtype=np.float64).reshape(-1, 3)
    area = _area(table[:, 0], table[:, 2], edges) - _area(table[:, 1], table[:, 2], edges)
    return np.maximum(np.diff(area) / np.diff(edges), 0.0)


def _area(times: Numbers, amounts: Numbers, until: Numbers) -> Numbers:
    """Return, for each `until`, the amounts that began before it times how long ago that was."""
    order = np.argsort(times, kind="stable")
    times, amounts = times[order], amounts[order]
    # Times are counted from the first edge: those of the epoch are so large that differences of sums would be noise.
    times, until = times - until[0], until - until[0]
    sums, moments = np.concatenate([[0.0], np.cumsum(amounts)]), np.concatenate([[0.0], np.cumsum(amounts * times)])
    index = np.searchsorted(times, until, side="right")
    result: Numbers = sums[index] * until - moments[index]
    return result


def percentiles(values: Sequence[float]) -> tuple[Numbers, Numbers]:
    """Return per cents and the values that so many stay below or at; finer where few are left."""
    cents = np.unique(np.concatenate([np.linspace(0, 99, 199), np.linspace(99, 100, 21)]))
    return cents, np.percentile(np.asarray(values, dtype=np.float64), cents)


def rounded(values: Numbers, digits: int = 4) -> list[float]:
    """Return numbers short enough to be written down by the thousand."""
    return [float(value) for value in np.round(values, digits)]
