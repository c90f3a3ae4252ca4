"""The expected work left, read from a life table.

Actuaries ask how long somebody of a given age will live. They count, for each year of age, how many people reached it and
how many died in it. Here the age is the work of an action or trajectory so far, in seconds on one core. The years are bins of work,
each `RATIO` times as wide as the one before.

A running action has reached its bin and not ended in it. So a table is useful from the first minute. It is not misled when only
short actions have ended yet (the estimator of Kaplan and Meier, 1958).

Where little is known, the rule is "as long again as it has lasted". As a prior, one in three ends in each bin, with the weight of
`PRIOR` observations. With bins of 1.5, half of the actions that have lasted some time then last as long again. Beyond the last bin
that was reached, the expected work left is the age itself.

Only numbers live here: no clock, no action.
"""

from __future__ import annotations

import math
from typing import Final

FIRST_S: Final = 0.1
"""Upper edge of the first bin, in seconds. Shorter actions are all alike: a hand-over costs about as much as such an action."""

RATIO: Final = 1.5
BINS: Final = 36
"""Bins: the last begins at some 27 hours."""

PRIOR_END: Final = 1 / 3
PRIOR: Final = 3.0
GROWTH: Final = 1.02
"""A table is read anew when its number of entries has grown by this factor since the last reading."""

EDGES: Final = (0.0, *(FIRST_S * RATIO**index for index in range(BINS - 1)))
"""Lower edges of the bins, in seconds."""

_LOG_RATIO: Final = math.log(RATIO)


def bin_of(work_s: float) -> int:
    """Return the bin in which some work lies."""
    if work_s < FIRST_S:
        return 0
    if work_s >= EDGES[-1]:
        return BINS - 1
    return min(1 + int(math.log(work_s / FIRST_S) / _LOG_RATIO + 1e-9), BINS - 1)


def bin_ends_at(index: int) -> float:
    """Return the work at which the bin after this one begins; infinite for the last."""
    return EDGES[index + 1] if index + 1 < BINS else math.inf


class LifeTable:
    """How many lives reached each bin, and how many ended in it."""

    __slots__ = ("_ended", "_left_s", "_reached", "_read_again_at", "_taken")

    def __init__(self) -> None:
        self._reached = [0] * BINS
        self._ended = [0] * BINS
        self._taken = 0
        self._read_again_at = 0.0
        self._left_s: list[float] = []

    def reach(self, first: int, last: int) -> None:
        """Count a life that has come from bin `first` to bin `last`, and is counted in none of them yet."""
        for index in range(first, last + 1):
            self._reached[index] += 1
        self._taken += 1

    def end(self, index: int, count: int = 1) -> None:
        """Count a life that has ended in a bin. A `count` of -1 takes an end back."""
        self._ended[index] += count
        self._taken += 1

    def left_s(self, index: int) -> float:
        """Return the expected work left, in seconds, of a life in a bin."""
        if self._taken >= self._read_again_at:
            self._read()
        return self._left_s[index]

    def _read(self) -> None:
        """Work out the expected work left for each bin, from the last reached bin down to the first."""
        self._read_again_at = self._taken * GROWTH + 1
        left_s = [max(edge, FIRST_S) for edge in EDGES]
        known = max((index for index in range(BINS - 1) if self._reached[index]), default=-1)
        for index in range(known, -1, -1):
            width_s = EDGES[index + 1] - EDGES[index]
            chance = (self._ended[index] + PRIOR * PRIOR_END) / (self._reached[index] + PRIOR)
            left_s[index] = chance * width_s / 2 + (1 - chance) * (width_s + left_s[index + 1])
        self._left_s = left_s
