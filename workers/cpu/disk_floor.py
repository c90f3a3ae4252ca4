"""The free disk below which a node opens no environment.

A full disk fails every command of every environment on the node, and a score that is computed on it says nothing. So new environments are
refused before that, in one line, while those that stand may go on and be closed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from workers.cpu.errors import DiskFull

MIB = 1 << 20


class DiskFloor:
    """Refuses to open environments while one of the disks under `folders` has less than `floor_mb` MiB free; 0 never refuses."""

    def __init__(self, floor_mb: int, folders: Iterable[str | Path]) -> None:
        """Look at the disks of those folders that this process sees."""
        self._floor_mb = floor_mb
        self._folders = [str(folder) for folder in folders if os.path.isdir(folder)]

    def check(self) -> None:
        """Raise `DiskFull` where an environment may not be opened now, or nobody can tell."""
        if not self._floor_mb:
            return
        for folder in self._folders:
            try:
                disk = os.statvfs(folder)
            except OSError as error:
                raise DiskFull(f"the node cannot tell how much disk is free under {folder}: {error.strerror}") from error
            free_mb = disk.f_bavail * disk.f_frsize // MIB
            if free_mb < self._floor_mb:
                raise DiskFull(
                    f"the node has {free_mb} MiB of disk free, less than its TANGRAM_DISK_FLOOR_MB of {self._floor_mb}: "
                    "it opens no environment until there is more"
                )
