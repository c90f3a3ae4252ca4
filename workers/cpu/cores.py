"""The cores of this machine, and where the core ids of a grant lie on them."""

from __future__ import annotations

import os
from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CoreMap:
    """The cores that the worker may use, in ascending order.

    An id among them is that core. Any other id is a *virtual core*, so a test can have a node of 64 cores on a machine of 2.
    Virtual cores are dealt out from the last core downwards, round after round. So the cores 0 to n - 1 of a node lie on different
    cores of a machine with n cores, and are spread evenly over a smaller machine.
    """

    available: tuple[int, ...]

    @classmethod
    def of_this_process(cls) -> CoreMap:
        """Return the cores in the affinity mask of this process."""
        return cls(tuple(sorted(os.sched_getaffinity(0))))

    def real(self, cores: tuple[int, ...]) -> frozenset[int]:
        """Return the cores of this machine on which the granted `cores` lie."""
        return frozenset(self._real(core) for core in cores)

    def _real(self, core: int) -> int:
        below = bisect_left(self.available, core)
        if below < len(self.available) and self.available[below] == core:
            return core
        virtual_before = core - below
        return self.available[-1 - virtual_before % len(self.available)]
