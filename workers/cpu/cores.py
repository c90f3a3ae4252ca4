"""The cores of this machine, and where the core ids of a grant lie on them."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CoreMap:
    """The cores that the worker may use, in order.

    An id that is not among them is a *virtual core* and lies on the core `id modulo number of cores`; so a test can
    have a node of 64 cores on a machine of 2.
    """

    available: tuple[int, ...]

    @classmethod
    def of_this_process(cls) -> CoreMap:
        """Return the cores in the affinity mask of this process."""
        return cls(tuple(sorted(os.sched_getaffinity(0))))

    def real(self, cores: tuple[int, ...]) -> frozenset[int]:
        """Return the cores of this machine on which the granted `cores` lie."""
        known = frozenset(self.available)
        return frozenset(core if core in known else self.available[core % len(self.available)] for core in cores)
