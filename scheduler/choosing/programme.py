"""A dynamic programme that gives out the units of one group, with the least sum of the candidates' durations.

It is exact for any curve, in O(n · spare · amounts), whole rows at a time. Pure functions of numbers; nothing here knows the kind
of the units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Amounts:
    """One candidate: ascending `units`, and the duration in seconds on each."""

    units: tuple[int, ...]
    durations_s: tuple[float, ...]


class Programme:
    """The dynamic programme over candidates and spare units, kept whole: every prefix of the candidates is solved by it."""

    def __init__(self, candidates: Sequence[Amounts], spare: int) -> None:
        """Fill the table for 0..`spare` units above the smallest amounts."""
        self._candidates = candidates
        self._spare = spare
        row: NDArray[np.float64] = np.zeros(spare + 1)
        self._choices: list[NDArray[np.int16]] = []
        for amounts in candidates:
            best = row + amounts.durations_s[0]
            choice = np.zeros(spare + 1, dtype=np.int16)
            for index in range(1, len(amounts.units)):
                extra_units = amounts.units[index] - amounts.units[0]
                if extra_units > spare:
                    break
                candidate = row[: spare + 1 - extra_units] + amounts.durations_s[index]
                better = candidate < best[extra_units:] - 1e-12
                best[extra_units:][better] = candidate[better]
                choice[extra_units:][better] = index
            row = best
            self._choices.append(choice)

    def best(self, count: int, spare: int) -> list[int]:
        """Return the indices of the amounts by which the first `count` candidates take least in all, with `spare` units to give out."""
        left = min(spare, self._spare)
        chosen = [0] * count
        for number in range(count - 1, -1, -1):
            index = int(self._choices[number][left])
            chosen[number] = index
            left -= self._candidates[number].units[index] - self._candidates[number].units[0]
        return chosen
