"""Made-up GPUs that all processes of a test share: a folder for each GPU, in it a file for each process that holds memory of it.

A file is named after the process and holds the time at which the process began and its MiB. As with a driver, a process that has ended
holds nothing, whoever has its number now. Standard library only, since `fake_server.py` uses it.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

TOTAL = "total"
"""The file that holds the MiB of a GPU."""


def make(gpus: Path, names: list[str], total_mb: float) -> None:
    """Make GPUs of `total_mb` MiB each that nobody uses."""
    for name in names:
        (gpus / name).mkdir(parents=True, exist_ok=True)
        (gpus / name / TOTAL).write_text(f"{total_mb}")


def total_mb(gpus: Path, name: str) -> float:
    """Return the MiB that a GPU has in all."""
    return float((gpus / name / TOTAL).read_text())


def began(pid: int) -> str | None:
    """Return when a process began, in ticks of the kernel; None if it has ended."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if words[0] in "ZX" else words[19]


def hold(gpus: Path, name: str, pid: int, mb: float, owner: str = "") -> None:
    """Have a process hold `mb` MiB of a GPU from now on; one process may hold several parts, each of an `owner`."""
    file = gpus / name / f"{pid}{owner and '-'}{owner}"
    draft = file.with_name(f".{file.name}-{os.getpid()}")
    draft.write_text(f"{began(pid)} {mb}")
    draft.replace(file)


def held_mb(gpus: Path, name: str) -> dict[int, float]:
    """Return the MiB that each living process holds of a GPU."""
    found: dict[int, float] = {}
    for file in (gpus / name).glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError):
            since, mb = file.read_text().split()
            pid = int(file.name.partition("-")[0])
            if began(pid) == since:
                found[pid] = found.get(pid, 0.0) + float(mb)
    return found


def used_mb(gpus: Path, name: str) -> float:
    """Return the MiB of a GPU that all living processes hold together."""
    return sum(held_mb(gpus, name).values())
