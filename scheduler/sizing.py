"""On how many cells an instance that is brought should compute.

With few actions on hand on many, where an action is soonest done; with many on few, as parallelism is never free. What is on
hand is thought of as done in rounds, on as many instances of one size as there is room for, each of which serves anybody. Pure functions
of numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

RESTORED: Final = 0.3
"""Share of the actions that are taken to need a restore first. What is measured would not do: it follows from the size, and falls
just where many small instances leave nothing to restore."""


def best_size(sizes: Sequence[int], durations_s: Sequence[float], restore_s: float, per_cell: float) -> int:
    """Return the size on which actions are expected to be done soonest in the mean.

    `durations_s` are those of an action on each of the ascending sizes; `per_cell` is how many there are for each place on a cell.
    Of sizes that are as good the smallest is returned.
    """
    best_s, best = math.inf, sizes[0]
    for size, duration_s in zip(sizes, durations_s, strict=True):
        rounds = max(1.0, per_cell * size)
        mean_s = (duration_s + RESTORED * restore_s) * (rounds + 1.0) / 2.0
        if mean_s < best_s - 1e-9:
            best_s, best = mean_s, size
    return best
