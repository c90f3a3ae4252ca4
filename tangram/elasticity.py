"""How long an action runs on m units of its key elastic resource.

The duration model of the paper (section "Unified action formulation"): `getDur(m) = T_ori / (E(m) · m)`.
`T_ori`, here `work_s`, is the duration on one unit; `E(m)` the parallel efficiency. A *curve* is what gives
`E(m)·m`, the speed-up: Amdahl's law from one number, a table point by point, or flat where units change nothing.
Only pure values live here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tangram.errors import InvalidAction


@dataclass(frozen=True, slots=True)
class Flat:
    """A curve for actions that run no faster on more units."""

    def speedup(self, units: float) -> float:
        """Return `E(m)·m`, which is 1 for any m."""
        return 1.0


@dataclass(frozen=True, slots=True)
class Amdahl:
    """Amdahl's law: a share `parallel_fraction` of the work splits over the units."""

    parallel_fraction: float

    def __post_init__(self) -> None:
        """Refuse fractions outside 0..1."""
        if not _finite(self.parallel_fraction) or not 0.0 <= self.parallel_fraction <= 1.0:
            raise InvalidAction("parallel_fraction", f"must be between 0 and 1, not {self.parallel_fraction!r}")

    def speedup(self, units: float) -> float:
        """Return `1 / ((1 - p) + p / m)`."""
        return 1.0 / ((1.0 - self.parallel_fraction) + self.parallel_fraction / units)


@dataclass(frozen=True, slots=True)
class Table:
    """Efficiency point by point; one unit has efficiency 1 unless the table says otherwise."""

    efficiency: tuple[tuple[int, float], ...]
    _points: dict[int, float] = field(init=False, repr=False, compare=False, hash=False)

    def __post_init__(self) -> None:
        """Refuse efficiencies outside 0..1."""
        for units, value in self.efficiency:
            if not isinstance(units, int) or isinstance(units, bool) or units < 1:
                raise InvalidAction("efficiency", f"units must be whole and at least 1, not {units!r}")
            if not _finite(value) or not 0.0 < value <= 1.0:
                raise InvalidAction("efficiency", f"E({units}) must be above 0 and at most 1, not {value!r}")
        object.__setattr__(self, "_points", {1: 1.0, **dict(self.efficiency)})

    def speedup(self, units: float) -> float:
        """Return `E(m)·m`. Raises `InvalidAction` where the table has no such m."""
        if units not in self._points:
            raise InvalidAction("efficiency", f"says nothing of {units} units")
        return self._points[int(units)] * units


Curve = Flat | Amdahl | Table

FLAT = Flat()


@dataclass(frozen=True, slots=True, kw_only=True)
class Elasticity:
    """The amounts of one resource an action can use, and what each amount does to its duration.

    `units` are the acceptable amounts, ascending and distinct; `curve` their effect.
    """

    units: tuple[int, ...] = (1,)
    curve: Curve = FLAT

    def __post_init__(self) -> None:
        """Refuse amounts that are not whole, positive, ascending and known to the curve."""
        check_units(self.units)
        for amount in self.units:
            self.curve.speedup(amount)

    def duration_s(self, work_s: float, units: float) -> float:
        """Return seconds on `units`, for `work_s` seconds on one unit."""
        return work_s / self.curve.speedup(units)

    def best_units(self) -> int:
        """Return the smallest amount with the shortest duration."""
        return max(self.units, key=lambda amount: (self.curve.speedup(amount), -amount))


def check_units(units: Sequence[object], name: str = "units") -> None:
    """Raise `InvalidAction` unless `units` is a non-empty ascending sequence of distinct whole numbers above 0."""
    if not units:
        raise InvalidAction(name, "must name at least one amount")
    for amount in units:
        if not isinstance(amount, int) or isinstance(amount, bool) or amount < 1:
            raise InvalidAction(name, f"amounts must be whole and at least 1, not {amount!r}")
    if list(units) != sorted(set(units)):  # type: ignore[type-var]
        raise InvalidAction(name, f"amounts must be ascending and distinct, not {list(units)!r}")


def make_curve(parallel_fraction: float | None = None, efficiency: Mapping[int | str, float] | None = None) -> Curve:
    """Build the curve that the two optional words of a trace or a header describe.

    Raises
    ------
    InvalidAction
        When both are given, or a value is outside its range.

    """
    if parallel_fraction is not None and efficiency is not None:
        raise InvalidAction("efficiency", "give either parallel_fraction or efficiency, not both")
    if parallel_fraction is not None:
        return Amdahl(parallel_fraction)
    if efficiency is None:
        return FLAT
    points: dict[int, float] = {}
    for units, value in efficiency.items():
        try:
            points[int(units)] = value
        except ValueError:
            raise InvalidAction("efficiency", f"units must be whole numbers, not {units!r}") from None
    return Table(tuple(sorted(points.items())))


def _finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
