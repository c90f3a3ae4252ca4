"""Give out the units of one group among candidates so that the sum of their durations is least.

Each candidate has ascending amounts and a duration for each. All candidates get at least their smallest amount;
the question is who gets the rest. Two exact ways, and the reason for both:

* `by_marginal_gain`: all steps by "seconds saved per unit". Where every curve has diminishing returns and the greedy
  walk never has to pass over a step for want of units, its result is optimal, in O(s log n) for s steps.
* `by_dynamic_programme`: exact for any curve, in O(n · spare · amounts), here with whole rows at a time.

`allocate` walks greedily and falls back to the programme only where the walk cannot prove its result.
Pure functions of numbers; nothing here knows what a unit is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PROGRAMME_CELLS = 20_000
"""Table entries up to which the programme is run inside `allocate`. Above it, some ten candidates on a hundred units,
the greedy result stands: it is worse than the best by less than one step of one candidate, which is nothing among so
many, and the programme would take milliseconds."""

ROUNDING = 1e-12
"""Saving per unit, as a share of the whole duration, that is taken for rounding and buys nothing."""

Step = tuple[float, int, int]
"""Seconds saved per unit, the index of the amount that is reached, and the units that it costs."""


def steps_of(units: Sequence[int], durations_s: Sequence[float]) -> tuple[Step, ...]:
    """Return the steps along the lower convex hull of a curve, from the smallest amount to the best: ever less gain."""
    steps: list[Step] = []
    index, ceiling, rounding = 0, float("inf"), ROUNDING * durations_s[0]
    while True:
        best_gain, target = 0.0, -1
        for later in range(index + 1, len(units)):
            gain = (durations_s[index] - durations_s[later]) / (units[later] - units[index])
            if gain > best_gain + rounding:
                best_gain, target = gain, later
        if target < 0:
            return tuple(steps)
        ceiling = min(ceiling, best_gain)  # rounding must not put a later step before an earlier one
        steps.append((ceiling, target, units[target] - units[index]))
        index = target


@dataclass(frozen=True, slots=True)
class Demand:
    """One candidate: ascending `units` and the duration in seconds on each, times `share`, the share of it still to do.

    `steps` are those of the whole duration (`steps_of`); they are worked out where they are not given.
    """

    units: tuple[int, ...]
    durations_s: tuple[float, ...]
    share: float = 1.0
    steps: tuple[Step, ...] | None = None


@dataclass(frozen=True, slots=True)
class Walk:
    """Result of a greedy walk: an index into each demand's amounts, and whether it is surely optimal."""

    chosen: list[int]
    proven: bool


def allocate(demands: Sequence[Demand], units: int) -> list[int]:
    """Return the amount for each demand, with the least total duration for at most `units` units in all.

    Raises `ValueError` when the smallest amounts alone exceed `units`.
    """
    spare = units - sum(demand.units[0] for demand in demands)
    if spare < 0:
        raise ValueError(f"{units} units do not hold the smallest amounts of {len(demands)} demands")
    walk = by_marginal_gain(demands, spare)
    chosen = walk.chosen
    if not walk.proven and len(demands) * spare * max(len(d.units) for d in demands) <= PROGRAMME_CELLS:
        chosen = Programme(demands, spare).best(len(demands))
    return [demand.units[index] for demand, index in zip(demands, chosen, strict=True)]


def by_marginal_gain(demands: Sequence[Demand], spare: int) -> Walk:
    """Hand out `spare` units step by step, each to the demand that saves most seconds per unit.

    A step leads to the next point of the demand's lower convex hull, so that curves that are flat at first and
    steep later are seen whole. `proven` is True when no affordable step was passed over for a smaller one.
    """
    order = [
        (-gain * demand.share, number, target, price)
        for number, demand in enumerate(demands)
        if len(demand.units) > 1
        for gain, target, price in (steps_of(demand.units, demand.durations_s) if demand.steps is None else demand.steps)
    ]
    order.sort()
    chosen = [0] * len(demands)
    passed_over: set[int] = set()
    for _, number, target, price in order:
        if spare <= 0:
            break
        if price > spare:
            passed_over.add(number)
        elif number not in passed_over:
            spare -= price
            chosen[number] = target
    return Walk(chosen, not passed_over)


class Programme:
    """The dynamic programme over demands and spare units, kept whole: every prefix of the demands is solved by it.

    `totals[i][s]` is the least total duration of the first i demands with at most s spare units.
    """

    def __init__(self, demands: Sequence[Demand], spare: int) -> None:
        """Fill the table for 0..`spare` units above the smallest amounts."""
        self._demands = demands
        self._spare = spare
        row: NDArray[np.float64] = np.zeros(spare + 1)
        self._rows = [row]
        self._choices: list[NDArray[np.int16]] = []
        for demand in demands:
            best = row + demand.durations_s[0] * demand.share
            choice = np.zeros(spare + 1, dtype=np.int16)
            for index in range(1, len(demand.units)):
                price = demand.units[index] - demand.units[0]
                if price > spare:
                    break
                candidate = row[: spare + 1 - price] + demand.durations_s[index] * demand.share
                better = candidate < best[price:] - 1e-12
                best[price:][better] = candidate[better]
                choice[price:][better] = index
            row = best
            self._rows.append(row)
            self._choices.append(choice)

    def total_s(self, count: int, spare: int) -> float:
        """Return the least total duration of the first `count` demands with `spare` units to give out."""
        return float(self._rows[count][min(spare, self._spare)])

    def best(self, count: int, spare: int | None = None) -> list[int]:
        """Return the amounts' indices that reach `total_s(count, spare)`."""
        left = self._spare if spare is None else min(spare, self._spare)
        chosen = [0] * count
        for number in range(count - 1, -1, -1):
            index = int(self._choices[number][left])
            chosen[number] = index
            left -= self._demands[number].units[index] - self._demands[number].units[0]
        return chosen
