"""How many of a node's cores are busy, as the kernel counts it: what stands beside the cores that are granted."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

STAT: Final = Path("/proc/stat")
TICKS_S: Final = 1 / os.sysconf("SC_CLK_TCK")
IDLE: Final = (3, 4)
"""Which times of a core are idle and waiting for disks."""
TIMES: Final = 8
"""Times that add up. Those of guests follow, which Linux counts among the user's, too."""

Times = Mapping[int, tuple[float, float]]
"""For each core the seconds in which it was busy, and all seconds."""


class BusyCores:
    """Measures between one call and the next. For the thread that makes the beats."""

    def __init__(self, cores: Collection[int], times: Times) -> None:
        """Watch these cores, from `times` on; with none, nothing is said."""
        self._cores = tuple(cores)
        self._last = of_cores(times, self._cores)

    def since_last(self, times: Times) -> dict[str, float]:
        """Return `busy_cores` since the last call, rounded to hundredths; nothing where it cannot be measured, or no time has passed."""
        before, self._last = self._last, of_cores(times, self._cores)
        busy = 0.0
        if not before or before.keys() != self._last.keys():
            return {}
        for core, (busy_now, all_now) in self._last.items():
            busy_before, all_before = before[core]
            if all_now <= all_before:
                return {}
            busy += max(0.0, busy_now - busy_before) / (all_now - all_before)
        return {"busy_cores": round(busy, 2)}


def core_times() -> Times:
    """Return the times of each core of which the kernel tells: where it has many interrupts, reading them takes milliseconds."""
    try:
        lines = [line.split() for line in STAT.read_text(encoding="ascii").splitlines()]
    except OSError:
        return {}
    known = {int(line[0][3:]): [int(ticks) * TICKS_S for ticks in line[1 : 1 + TIMES]] for line in lines if _is_core(line)}
    idle_s = {core: sum(times[at] for at in IDLE) for core, times in known.items()}
    return {core: (sum(times) - idle_s[core], sum(times)) for core, times in known.items()}


def of_cores(times: Times, cores: Collection[int]) -> Times:
    """Return the times of these cores; nothing where the kernel does not tell of each.

    It leaves out cores that are offline, and in some containers it numbers them anew.
    """
    return {core: times[core] for core in cores} if times.keys() >= set(cores) else {}


def _is_core(line: list[str]) -> bool:
    return bool(line) and line[0].startswith("cpu") and line[0][3:].isdecimal()
