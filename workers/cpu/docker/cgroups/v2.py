"""Version 2: one hierarchy. The container init moves to a leaf, `init`, so that sessions' groups may have controllers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection

from workers.cpu.control_files import Mounts, keyed, paths_of, pids, remove_group, write
from workers.cpu.docker.cgroups.abstract import PERIOD_US, UNLIMITED, ContainerGroup, SessionGroup, core_list
from workers.cpu.memory.controls import ControlsV2

INIT = "init"
US_PER_S = 1e6


class SessionGroupV2(SessionGroup):
    """The child group `name`."""

    def __init__(self, container: ContainerGroup, name: str) -> None:
        super().__init__(container, f"{container.folder}/{name}", "", UNLIMITED)
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.folder)
        self.park()

    def add(self, pid: int) -> None:
        write(f"{self.folder}/cgroup.procs", str(pid))

    def write_cores(self, cores: str) -> None:
        write(f"{self.folder}/cpuset.cpus", cores)

    def write_quota(self, quota_us: int) -> None:
        write(f"{self.folder}/cpu.max", f"{'max' if quota_us == UNLIMITED else quota_us} {PERIOD_US}")

    def cpu_s(self) -> float:
        return keyed(f"{self.folder}/cpu.stat", "usage_usec") / US_PER_S

    def freeze(self) -> None:
        write(f"{self.folder}/cgroup.freeze", "1")

    def thaw(self) -> None:
        write(f"{self.folder}/cgroup.freeze", "0")

    def remove_folders(self) -> None:
        remove_group(self.folder)


class ContainerGroupV2(ContainerGroup):
    """The group that the engine has made for the container whose process 1 is `pid`."""

    def __init__(self, mounts: Mounts, pid: int, all_cores: Collection[int]) -> None:
        assert mounts.unified is not None, "the caller has found version 2"
        # An earlier worker may have moved the container init.
        super().__init__(f"{mounts.unified}{paths_of(pid)['']}".removesuffix(f"/{INIT}"), core_list(all_cores))
        leaf = f"{self.folder}/{INIT}"
        with contextlib.suppress(FileExistsError):
            os.mkdir(leaf)
        # A group whose children have controllers may have no process of its own.
        for each in pids(self.folder):
            write(f"{leaf}/cgroup.procs", str(each))
        write(f"{self.folder}/cgroup.subtree_control", "+cpu +cpuset")

    def session(self, name: str) -> SessionGroupV2:
        return SessionGroupV2(self, name)

    def controls(self) -> ControlsV2:
        return ControlsV2(self.folder)

    def oom_kills(self) -> int:
        return keyed(f"{self.folder}/memory.events", "oom_kill")
