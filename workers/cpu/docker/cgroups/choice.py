"""Which way grants take on this machine: by control files where they can be written, else through the engine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection
from typing import Literal

from workers.cpu.docker.cgroups.abstract import ContainerGroup
from workers.cpu.docker.cgroups.engine import ContainerGroupEngine
from workers.cpu.docker.cgroups.files import Mounts, paths_of
from workers.cpu.docker.cgroups.v1 import CONTROLLERS, ContainerGroupV1
from workers.cpu.docker.cgroups.v2 import ContainerGroupV2

Way = Literal["cgroup v1", "cgroup v2", "docker update"]
Update = Callable[[str, str, int, int, int], None]
"""Tells the engine a container's cores, quota, period and weight."""


class CgroupsOf:
    """Gives the control groups of containers. `forced` takes one way whatever the machine allows."""

    def __init__(self, all_cores: Collection[int], update: Update, forced: Way | None = None) -> None:
        self._mounts, self._all_cores, self._update, self._forced = Mounts.of_this_process(), tuple(all_cores), update, forced

    def way(self, pid: int) -> Way:
        """Return how the groups of a process are written. Raises `OSError` where they cannot even be read."""
        if self._forced is not None:
            return self._forced
        mounts, paths = self._mounts, paths_of(pid)
        if all(name in mounts.by_controller for name in CONTROLLERS):
            folders = [f"{mounts.by_controller[name]}{paths[name]}" for name in CONTROLLERS]
            found: Way = "cgroup v1"
        elif mounts.unified is not None:
            folders, found = [f"{mounts.unified}{paths['']}"], "cgroup v2"
        else:
            return "docker update"
        return found if all(_can_make_folders(folder) for folder in folders) else "docker update"

    def __call__(self, container_id: str, pid: int) -> ContainerGroup:
        """Return the groups of a container."""
        way = self.way(pid)
        if way == "cgroup v1":
            return ContainerGroupV1(self._mounts, pid, self._all_cores)
        if way == "cgroup v2":
            return ContainerGroupV2(self._mounts, pid, self._all_cores)

        def update(cores: str, quota_us: int, period_us: int, shares: int) -> None:
            self._update(container_id, cores, quota_us, period_us, shares)

        return ContainerGroupEngine(self._mounts, pid, self._all_cores, update)


def _can_make_folders(folder: str) -> bool:
    """Say whether groups can be made in this one, by making one: a read-only mount refuses root, too."""
    probe = f"{folder}/tangram-probe"
    try:
        os.mkdir(probe)
    except OSError:
        return False
    with contextlib.suppress(OSError):
        os.rmdir(probe)
    return True
