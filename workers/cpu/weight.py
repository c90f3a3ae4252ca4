"""The weight of a control group against other groups: that of its cores in the foreground, next to nothing in the background.

The kernel divides a core among the groups that want it, level by level, by these weights. It spreads the weight of a group over the
cores on which the group runs. So a group in the foreground has the weight of one core for each of its cores. A group in the background
has 1 part in 300 of one core's weight at most, and gets that part of a core that a foreground group wants.

| kernel                      | background        | foreground, n cores                     |
|-----------------------------|-------------------|-----------------------------------------|
| Linux 5.15 or later         | `cpu.idle` 1      | `cpu.idle` 0, and one of the next two   |
| control groups v1           | `cpu.shares` 2    | `cpu.shares` 1024 n, at most 262144     |
| control groups v2           | `cpu.weight` 1    | `cpu.weight` 100 n, at most 10000       |

Rules: the standard library only; the supervisor process imports this file too.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Literal

from workers.cpu import control_files

Means = Literal["cgroup", "affinity"]
"""By what processes are held in the background, best first: control groups or affinity."""

IDLE = "cpu.idle"
"""The control file that holds a group in the background by itself; with 0 the group has the weight of one core."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A control file with the weight of a group: in the background, of each core, and the most that the kernel takes."""

    name: str
    background: int
    core: int
    most: int

    def of(self, cores: int) -> int:
        """Return the weight of a group with so many cores; one that has none in particular counts as one core does."""
        return min(self.most, self.core * max(1, cores))


V1, V2 = Weight("cpu.shares", 2, 1024, 262_144), Weight("cpu.weight", 1, 100, 10_000)
WEIGHTS = (V1, V2)


def set_background(folder: str) -> None:
    """Leave the group only time that no group in the foreground wants. Raises `OSError`."""
    try:
        control_files.write(f"{folder}/{IDLE}", "1")
    except FileNotFoundError:
        _set(folder, {weight.name: weight.background for weight in WEIGHTS})


def set_foreground(folder: str, cores: int = 1) -> None:
    """Have the group count as much as its cores do. Raises `OSError`."""
    with contextlib.suppress(FileNotFoundError):
        # First, since the kernel refuses a weight while this is 1.
        control_files.write(f"{folder}/{IDLE}", "0")
    _set(folder, {weight.name: weight.of(cores) for weight in WEIGHTS})


def _set(folder: str, values: dict[str, int]) -> None:
    for name, value in values.items():
        with contextlib.suppress(FileNotFoundError):
            control_files.write(f"{folder}/{name}", str(value))
            return
    raise FileNotFoundError(f"{folder} has no weight")
