"""The version of control groups on this machine, and whether the worker can write them."""

from __future__ import annotations

import os
from collections.abc import Collection

from workers.cpu.control_files import Mounts, paths_of, pids
from workers.cpu.docker.cgroups.abstract import ContainerGroup
from workers.cpu.docker.cgroups.v1 import CONTROLLERS, ContainerGroupV1
from workers.cpu.docker.cgroups.v2 import ContainerGroupV2
from workers.cpu.errors import EngineUnavailable

NEEDS = "a worker with containers must be root and have the host's control groups, writable, at /sys/fs/cgroup"


class ControlGroups:
    """Gives the control groups of containers.

    Raises `EngineUnavailable` when the worker cannot write control groups, or sees other ones than the engine.
    """

    def __init__(self, all_cores: Collection[int]) -> None:
        self.trial: tuple[str, str | None]
        """Folders of groups for a trial of memory, in version 1 with a freezer."""
        self._mounts, self._all_cores = Mounts.of_this_process(), tuple(all_cores)
        by_controller = self._mounts.by_controller
        self._is_v1 = all(name in by_controller for name in CONTROLLERS)
        if self._is_v1:
            hierarchies = {name: str(by_controller[name]) for name in CONTROLLERS}
        elif self._mounts.unified is not None:
            hierarchies = {"": str(self._mounts.unified)}
        else:
            raise EngineUnavailable(f"no control groups are mounted here: {NEEDS}")
        if os.geteuid() != 0:
            raise EngineUnavailable(f"control groups cannot be written by user {os.geteuid()}: {NEEDS}")
        own, name = paths_of(os.getpid()), f"tangram-trial-{os.getpid()}"
        if self._is_v1:
            memory = f"{by_controller.get('memory', '')}{own.get('memory', '')}/{name}"
            self.trial = memory, f"{hierarchies['freezer']}{own['freezer']}/{name}"
        else:
            self.trial = f"{hierarchies['']}/{name}", None
        for name, top in hierarchies.items():
            _check_writable(f"{top}{own[name]}")

    def __call__(self, pid: int) -> ContainerGroup:
        """Return the groups of the container whose process 1 is `pid`. Raises `OSError`."""
        kind = ContainerGroupV1 if self._is_v1 else ContainerGroupV2
        return kind(self._mounts, pid, self._all_cores)


def _check_writable(group: str) -> None:
    """Refuse a folder that is not this process's own control group, or in which no group can be made."""
    # In a control group namespace of its own, the worker reads paths that lead elsewhere on the host.
    if os.getpid() not in pids(group):
        raise EngineUnavailable(f"{group} is not the worker's own control group: {NEEDS}")
    probe = f"{group}/tangram-probe-{os.getpid()}"
    try:
        os.mkdir(probe)
        os.rmdir(probe)
    except OSError as error:
        raise EngineUnavailable(f"control groups cannot be written: {group}: {error.strerror}: {NEEDS}") from error
