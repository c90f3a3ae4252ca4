"""What several of these tests need: how a process is held back that no command in the foreground belongs to."""

from __future__ import annotations

from pathlib import Path

from tests.workers_cpu.support import in_background, is_of_cpu
from workers.cpu.abstract import Sandbox

from .conftest import Kind


def quota_of(pid: int) -> int:
    """Return the core-microseconds of each period that a process may use, below 0 for all."""
    lines = [line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
    folders = [f"/sys/fs/cgroup/{name}{path}" for _, name, path in lines if is_of_cpu(name)]
    files = [Path(folder, name) for folder in folders for name in ("cpu.cfs_quota_us", "cpu.max")]
    (said,) = [file.read_text().split()[0] for file in files if file.exists()]
    return -1 if said == "max" else int(said)


def is_held_back(kind: Kind, sandbox: Sandbox, pid: int) -> bool:
    """Say whether a process has next to nothing of a core, or only what others leave idle: as what commands left running does."""
    return quota_of(pid) > 0 if kind.parks else in_background(pid, sandbox.background)
