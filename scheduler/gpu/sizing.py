"""The size of a new instance: the number of cells on which actions are done soonest in the mean.

Few actions get many cells each, where each action is fast. Many actions get few cells each, so that more of them run at once. On
twice the cells, an action is less than twice as fast. To compare sizes, imagine that instances of one size hold all cells and that
each can serve any action. The actions on hand then run in waves, one at a time on each place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from scheduler.gpu.cells import CellGroup


def best_size(sizes: Sequence[int], durations_s: Sequence[float], restore_s: float, per_cell: float) -> int:
    """Return the size on which actions should be done soonest in the mean; of equally good sizes the smallest.

    `sizes` ascend, and `durations_s` are those of an action on each; `restore_s` is the mean cost of restores for an action, `per_cell` the
    backlog of each cell, divided by the actions that an instance runs at once.
    """
    best_s, best = math.inf, sizes[0]
    for size, duration_s in zip(sizes, durations_s, strict=True):
        waves = max(1.0, per_cell * size)
        mean_s = (duration_s + restore_s) * (waves + 1.0) / 2.0
        if mean_s < best_s - 1e-9:
            best_s, best = mean_s, size
    return best


class Backlog:
    """The backlog of each cell. Running actions count on their node; all others are spread over the nodes that could run them."""

    def __init__(self, groups: Iterable[CellGroup]) -> None:
        self._per_cell = {group: len(group.running) / group.capacity for group in groups if group.capacity}

    def spread(self, actions: float, groups: Iterable[CellGroup]) -> None:
        """Add actions that any of these nodes could run."""
        able = [group for group in groups if group in self._per_cell]
        cells = sum(group.capacity for group in able)
        for group in able:
            self._per_cell[group] += actions / cells

    def per_cell(self, groups: Iterable[CellGroup]) -> float:
        """Return the actions for each cell of these nodes, in the mean."""
        able = [group for group in groups if group in self._per_cell]
        cells = sum(group.capacity for group in able)
        return sum(self._per_cell[group] * group.capacity for group in able) / max(1, cells)
