"""On how many cells an instance that is brought should compute: those on which actions are done soonest in the mean.

With few actions on hand that is many cells, where each is fast; with many it is few, so that more of them run at once, as twice the
cells make nobody twice as fast. To compare sizes, all cells are thought of as held by instances of one size, any of which serves
anybody: what is on hand is done on them in rounds, one action on each place at a time. Pure functions of numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

RESTORED: Final = 0.3
"""Share of the actions that are taken to need a restore first. The share that is measured would not do: it follows from the size, and
falls just where many small instances leave nothing to restore."""


def best_size(sizes: Sequence[int], durations_s: Sequence[float], restore_s: float, per_cell: float) -> int:
    """Return the size on which actions are expected to be done soonest in the mean.

    `durations_s` are those of an action on each of the ascending sizes; `per_cell` is how many are on hand for each cell,
    divided by how many an instance runs at once.
    Of sizes that are as good the smallest is returned.
    """
    best_s, best = math.inf, sizes[0]
    for size, duration_s in zip(sizes, durations_s, strict=True):
        rounds = max(1.0, per_cell * size)
        mean_s = (duration_s + RESTORED * restore_s) * (rounds + 1.0) / 2.0
        if mean_s < best_s - 1e-9:
            best_s, best = mean_s, size
    return best
