"""How much memory this process may use: the machine's, or less where a control group limits it (`app/own_groups.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

from app.own_groups import PROC, own_groups

MIB = 1 << 20

MOST_KEPT_MB = 1024

_LIMIT = {"cgroup": "memory.limit_in_bytes", "cgroup2": "memory.max"}


def usable_mb(proc: Path = PROC) -> int:
    """Return the MiB that this process may use; `proc` is its folder of the kernel's."""
    return min(psutil.virtual_memory().total, *_limits(proc), 1 << 63) // MIB


def for_environments_mb(there_mb: int | None = None) -> int:
    """Return the MiB of `there_mb` that all environments may use together: the rest is for the worker and what is beside it.

    By default `there_mb` is what this process may use.
    """
    there_mb = usable_mb() if there_mb is None else there_mb
    return there_mb - min(there_mb // 8, MOST_KEPT_MB)


def _limits(proc: Path) -> Iterator[int]:
    """Yield the limits of the groups that the process is in, in bytes."""
    for kind, folder in own_groups("memory", proc):
        try:
            limit = (folder / _LIMIT[kind]).read_text().strip()
        except OSError:
            continue  # the root of version 2 has no limit
        if limit.isdigit():
            yield int(limit)
