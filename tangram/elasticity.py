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
from itertools import pairwise
from typing import Annotated, Any, Final

from pydantic import PlainSerializer, PlainValidator

from tangram.errors import InvalidAction

LARGEST_AMOUNT: Final = (1 << 31) - 1
"""Largest amount of any resource: what a column `INTEGER` of the journal holds. As memory, it is 2 PB."""

MOST_AMOUNTS: Final = 4096
"""Most amounts of one resource, and most points of a curve, that an action may name. The scheduler looks at each of them."""

LEAST_EFFICIENCY: Final = 1e-6
"""Smallest efficiency of a table: durations must stay in the range of a float."""


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
            raise InvalidAction("parallel_fraction", f"must be between 0 and 1, not {shown(self.parallel_fraction)}")

    def speedup(self, units: float) -> float:
        """Return `1 / ((1 - p) + p / m)`."""
        return 1.0 / ((1.0 - self.parallel_fraction) + self.parallel_fraction / units)


@dataclass(frozen=True, slots=True)
class Table:
    """Efficiency point by point, ascending in units; one unit has efficiency 1 unless the table says otherwise."""

    efficiency: tuple[tuple[int, float], ...]
    _points: dict[int, float] = field(init=False, repr=False, compare=False, hash=False)

    def __post_init__(self) -> None:
        """Refuse efficiencies outside 0..1, and amounts that are wrong, too many or named twice."""
        if len(self.efficiency) > MOST_AMOUNTS:
            raise InvalidAction("efficiency", f"names more than {MOST_AMOUNTS} amounts")
        for units, value in self.efficiency:
            if not _is_amount(units):
                raise InvalidAction("efficiency", f"units must be whole and from 1 to {LARGEST_AMOUNT}, not {shown(units)}")
            if not _finite(value) or not LEAST_EFFICIENCY <= value <= 1.0:
                raise InvalidAction("efficiency", f"E({units}) must be from {LEAST_EFFICIENCY:g} to 1, not {shown(value)}")
        object.__setattr__(self, "efficiency", tuple(sorted(self.efficiency)))
        if len(dict(self.efficiency)) < len(self.efficiency):
            raise InvalidAction("efficiency", "names an amount twice")
        object.__setattr__(self, "_points", {1: 1.0, **dict(self.efficiency)})

    def speedup(self, units: float) -> float:
        """Return `E(m)·m`. Raises `InvalidAction` where the table has no such m."""
        if units not in self._points:
            raise InvalidAction("efficiency", f"says nothing of {units} units")
        return self._points[int(units)] * units


def curve_words(curve: Flat | Amdahl | Table) -> dict[str, Any]:
    """Return the words of a trace or a header that describe a curve, as `make_curve` takes them."""
    match curve:
        case Amdahl():
            return {"parallel_fraction": curve.parallel_fraction}
        case Table():
            return {"efficiency": {str(units): value for units, value in curve.efficiency}}
    return {}


def _read_curve(words: object) -> Flat | Amdahl | Table:
    if not isinstance(words, dict) or not words.keys() <= {"parallel_fraction", "efficiency"}:
        raise InvalidAction("curve", f"must be parallel_fraction or efficiency, not {shown(words)}")
    return make_curve(**words)


Curve = Annotated[Flat | Amdahl | Table, PlainValidator(_read_curve), PlainSerializer(curve_words)]
"""A curve. Models hold it as the words that describe it."""

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


def check_units(units: object, name: str = "units") -> None:
    """Raise `InvalidAction` unless `units` is an ascending sequence of 1 to `MOST_AMOUNTS` distinct whole numbers above 0."""
    if type(units) is not tuple and (isinstance(units, (str, bytes)) or not isinstance(units, Sequence)):
        raise InvalidAction(name, f"must be a list of amounts, not {shown(units)}")
    if not units:
        raise InvalidAction(name, "must name at least one amount")
    if len(units) > MOST_AMOUNTS:
        raise InvalidAction(name, f"names more than {MOST_AMOUNTS} amounts")
    for amount in units:
        if not _is_amount(amount):
            raise InvalidAction(name, f"amounts must be whole and from 1 to {LARGEST_AMOUNT}, not {shown(amount)}")
    if any(later <= earlier for earlier, later in pairwise(units)):
        raise InvalidAction(name, f"amounts must be ascending and distinct, not {shown(list(units))}")


def make_curve(parallel_fraction: float | None = None, efficiency: Mapping[int | str, float] | None = None) -> Curve:
    """Build the curve that the two optional words of a trace or a header describe.

    Raises `InvalidAction` when both are given, or a value is outside its range.
    """
    if parallel_fraction is not None and efficiency is not None:
        raise InvalidAction("efficiency", "give either parallel_fraction or efficiency, not both")
    if parallel_fraction is not None:
        return Amdahl(parallel_fraction)
    if efficiency is None:
        return FLAT
    if not isinstance(efficiency, Mapping):
        raise InvalidAction("efficiency", f"must be an object, not {type(efficiency).__name__}")
    return Table(tuple((_whole(units), value) for units, value in efficiency.items()))


def shown(value: object) -> str:
    """Return a value as an error may show it: short, and without failing on what no text can be made of."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} too large to show"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _whole(units: object) -> int:
    """Return the amount that a key of a table means: JSON has only texts for keys."""
    if isinstance(units, str) and units.isascii() and units.isdigit() and len(units) <= 19:
        return int(units)
    if not isinstance(units, int) or isinstance(units, bool):
        raise InvalidAction("efficiency", f"units must be whole numbers, not {shown(units)}")
    return units


def _is_amount(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= LARGEST_AMOUNT


def _finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf
