"""Version 1: one hierarchy for each controller, and in each a child of the container's group for every session."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection

from workers.cpu.control_files import Mounts, keyed, paths_of, read, remove_group, write
from workers.cpu.docker.cgroups.abstract import PARKED_QUOTA_US, PERIOD_US, ContainerGroup, SessionGroup, core_list
from workers.cpu.memory.controls import ControlsV1

CONTROLLERS = ("cpu", "cpuacct", "cpuset", "freezer")
NS_PER_S = 1e9


class SessionGroupV1(SessionGroup):
    """A child group in each of `CONTROLLERS`, whose folders are in `parents`."""

    def __init__(self, container: ContainerGroup, parents: dict[str, str], name: str) -> None:
        self._folders = {controller: f"{parents[controller]}/{name}" for controller in CONTROLLERS}
        super().__init__(container, self._folders["cpu"], container.all_cores, PARKED_QUOTA_US)
        for folder in dict.fromkeys(self._folders.values()):
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder)
        cpu, cpuset = self._folders["cpu"], self._folders["cpuset"]
        write(f"{cpuset}/cpuset.mems", read(f"{parents['cpuset']}/cpuset.mems").strip())
        # Without this, each change of cores would have the kernel rebuild its scheduling domains.
        write(f"{cpuset}/cpuset.sched_load_balance", "0")
        self.write_cores(container.all_cores)
        write(f"{cpu}/cpu.cfs_period_us", str(PERIOD_US))
        self.write_quota(PARKED_QUOTA_US)

    def add(self, pid: int) -> None:
        for folder in dict.fromkeys(self._folders.values()):
            write(f"{folder}/cgroup.procs", str(pid))

    def write_cores(self, cores: str) -> None:
        write(f"{self._folders['cpuset']}/cpuset.cpus", cores)

    def write_quota(self, quota_us: int) -> None:
        write(f"{self._folders['cpu']}/cpu.cfs_quota_us", str(quota_us))

    def cpu_s(self) -> float:
        return int(read(f"{self._folders['cpuacct']}/cpuacct.usage")) / NS_PER_S

    def freeze(self) -> None:
        write(f"{self._folders['freezer']}/freezer.state", "FROZEN")

    def thaw(self) -> None:
        write(f"{self._folders['freezer']}/freezer.state", "THAWED")

    def remove_folders(self) -> None:
        for folder in dict.fromkeys(self._folders.values()):
            remove_group(folder)


class ContainerGroupV1(ContainerGroup):
    """The groups that the engine has made for the container whose process 1 is `pid`."""

    def __init__(self, mounts: Mounts, pid: int, all_cores: Collection[int]) -> None:
        paths = paths_of(pid)
        self._folders = {name: f"{mounts.by_controller[name]}{paths[name]}" for name in (*CONTROLLERS, "memory")}
        super().__init__(self._folders["cpu"], core_list(all_cores))

    def session(self, name: str) -> SessionGroupV1:
        return SessionGroupV1(self, self._folders, name)

    def controls(self) -> ControlsV1:
        return ControlsV1(self._folders["memory"], self._folders["freezer"])

    def oom_kills(self) -> int:
        return keyed(f"{self._folders['memory']}/memory.oom_control", "oom_kill")
