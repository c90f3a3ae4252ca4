"""Version 2: one hierarchy. The attendant moves to a leaf, `attendant`, so that sessions' groups may have controllers."""

from __future__ import annotations

import os
from collections.abc import Collection

from workers.cpu.docker.cgroups.abstract import PERIOD_US, UNLIMITED, WrittenContainer, WrittenGroup, core_list
from workers.cpu.docker.cgroups.files import Mounts, keyed, paths_of, pids, pids_below, remove_group, write

ATTENDANT = "attendant"
US_PER_S = 1e6


class SessionGroupV2(WrittenGroup):
    """The child group `name`."""

    def __init__(self, container: WrittenContainer, name: str) -> None:
        self._folder = folder = f"{container.folder}/{name}"
        super().__init__(container, folder, "", UNLIMITED)
        os.mkdir(folder)
        self.park()

    def add(self, pid: int) -> None:
        """Take a process in; see the base class."""
        write(f"{self._folder}/cgroup.procs", str(pid))

    def write_cores(self, cores: str) -> None:
        """Write the cores; see the base class."""
        write(f"{self._folder}/cpuset.cpus", cores)

    def write_quota(self, quota_us: int) -> None:
        """Write the quota, `max` for none; see the base class."""
        write(f"{self._folder}/cpu.max", f"{'max' if quota_us == UNLIMITED else quota_us} {PERIOD_US}")

    def processes(self) -> list[int]:
        """Return its processes; see the base class."""
        return pids(self._folder)

    def cpu_s(self) -> float:
        """Return the core-seconds; see the base class."""
        return keyed(f"{self._folder}/cpu.stat", "usage_usec") / US_PER_S

    def freeze(self) -> None:
        """Stop every process; see the base class."""
        write(f"{self._folder}/cgroup.freeze", "1")

    def thaw(self) -> None:
        """Let them go on; see the base class."""
        write(f"{self._folder}/cgroup.freeze", "0")

    def remove_folders(self) -> None:
        """Remove the folder; see the base class."""
        remove_group(self._folder)


class ContainerGroupV2(WrittenContainer):
    """The group that the engine has made for the container whose process 1 is `pid`."""

    def __init__(self, mounts: Mounts, pid: int, all_cores: Collection[int]) -> None:
        assert mounts.unified is not None, "the caller has found version 2"
        super().__init__(f"{mounts.unified}{paths_of(pid)['']}", core_list(all_cores))
        leaf = f"{self.folder}/{ATTENDANT}"
        os.mkdir(leaf)
        # A group whose children have controllers may have no process of its own.
        for each in pids(self.folder):
            write(f"{leaf}/cgroup.procs", str(each))
        write(f"{self.folder}/cgroup.subtree_control", "+cpu +cpuset")

    def session(self, name: str) -> SessionGroupV2:
        """Make the group of a session; see the base class."""
        return SessionGroupV2(self, name)

    def oom_kills(self) -> int:
        """Return the kernel's count, that of sessions' groups included; see the base class."""
        return keyed(f"{self.folder}/memory.events", "oom_kill")

    def processes(self) -> list[int]:
        """Return all processes; see the base class."""
        return pids_below(self.folder)
