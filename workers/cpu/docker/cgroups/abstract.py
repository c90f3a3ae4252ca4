"""What holds the processes of one session to a grant.

| state      | cores                                   | core-seconds a second                          |
|------------|-----------------------------------------|------------------------------------------------|
| parked     | those of the last grant                 | `PARKED_QUOTA_US` of a second, 0.5 %           |
| granted    | the cores of the grant                  | all of them                                    |
| lent       | those of other sessions' grants         | all of them                                    |
| background | any; where a session of the same        | what no group in the foreground wants          |
|            | container is granted some, these        |                                                |

A core is divided among containers first, and then among the sessions of each (`workers/cpu/weight.py`). So a container has the
weight of all cores that its sessions are granted. It is in the background while none is granted any and one is there. What is
in the background stays on the cores of its container's granted sessions: elsewhere it would have the weight of these.

What commands leave running is parked by a quota and not by a weight: a weight lets a process have all of an idle core, and
an environment that nobody uses must cost next to nothing. Quotas count over one second, the longest that kernels take.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Collection

from workers.cpu import weight

PERIOD_US = 1_000_000
PARKED_QUOTA_US = 5_000
UNLIMITED = -1


def core_list(cores: Collection[int]) -> str:
    """Return cores as the kernel writes them: `0-2,5`."""
    ranges: list[list[int]] = []
    for core in sorted(cores):
        if ranges and core == ranges[-1][1] + 1:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in ranges)


class Weighed:
    """The weight of the group `folder`; what stands there already is not written again."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._cores: int | None = 1

    def set_background(self) -> None:
        """Leave the group only time that no group in the foreground wants. Raises `OSError`."""
        if self._cores is not None:
            weight.set_background(self._folder)
            self._cores = None

    def set_foreground(self, cores: int) -> None:
        """Have the group count for so many cores. Raises `OSError`."""
        if cores != self._cores:
            weight.set_foreground(self._folder, cores)
            self._cores = cores


class SessionGroup(ABC):
    """The group of one session's processes: its shell and whatever comes from it, however it hides."""

    @abstractmethod
    def add(self, pid: int) -> None:
        """Take a process in; what it starts from now on is in, too."""

    @abstractmethod
    def grant(self, cores: Collection[int]) -> None:
        """Let the processes use these cores, or any where there are none."""

    @abstractmethod
    def send_to_background(self) -> None:
        """Send the processes to the background, on any core."""

    @abstractmethod
    def park(self) -> None:
        """Take the cores back."""

    def lend(self, cores: Collection[int]) -> None:
        """Let a parked group use cores of other sessions until it is parked again; nothing where the container is granted as a whole."""
        return

    @abstractmethod
    def processes(self) -> list[int]:
        """Return the ids of its processes, as the worker sees them."""

    @abstractmethod
    def cpu_s(self) -> float:
        """Return the core-seconds used in it so far."""

    @abstractmethod
    def freeze(self) -> None:
        """Stop every process, so that none can start another."""

    @abstractmethod
    def thaw(self) -> None:
        """Let them go on."""

    @abstractmethod
    def remove(self) -> None:
        """Remove the group, which must have no process; nothing where it is gone."""


class ContainerGroup(ABC):
    """The group that the engine has made for a container."""

    @abstractmethod
    def session(self, name: str) -> SessionGroup:
        """Make the group of a session."""

    @abstractmethod
    def oom_kills(self) -> int:
        """Return how many processes the kernel has killed because the container's memory was full."""

    @abstractmethod
    def processes(self) -> list[int]:
        """Return the ids of all of the container's processes, as the worker sees them."""


class WrittenContainer(ContainerGroup):
    """A container whose sessions' groups are control files; its own weight is in `folder`."""

    def __init__(self, folder: str, all_cores: str) -> None:
        self.folder, self.all_cores = folder, all_cores
        self.lock = threading.Lock()
        self._granted: dict[WrittenGroup, frozenset[int]] = {}
        self._in_background: set[WrittenGroup] = set()
        self._weight = Weighed(folder)

    def note(self, session: WrittenGroup, cores: Collection[int] | None, *, background: bool = False) -> None:
        """Take note of what a session holds, None for nothing, and whether it is in the background; weigh the container by that."""
        self._granted.pop(session, None)
        self._in_background.discard(session)
        if cores is not None:
            self._granted[session] = frozenset(cores)
        if background:
            self._in_background.add(session)
        if self._granted:
            self._weight.set_foreground(sum(max(1, len(cores)) for cores in self._granted.values()))
        elif self._in_background:
            self._weight.set_background()
        held = self._granted.values()
        shared = core_list(frozenset[int]().union(*held)) if all(held) else ""
        for each in self._in_background:
            each.set_cores(shared or self.all_cores)


class WrittenGroup(SessionGroup):
    """A session's group whose cores, quota and weight are control files; what stands there already is not written again."""

    def __init__(self, container: WrittenContainer, folder: str, cores: str, quota_us: int) -> None:
        """Take note of the `folder` with its weight, and of the cores and the quota that stand."""
        self._container, self._weight = container, Weighed(folder)
        self._cores, self._quota_us = cores, quota_us

    @abstractmethod
    def write_cores(self, cores: str) -> None:
        """Write the cores. Raises `OSError`."""

    @abstractmethod
    def write_quota(self, quota_us: int) -> None:
        """Write the core-microseconds of each period, or `UNLIMITED`. Raises `OSError`."""

    @abstractmethod
    def remove_folders(self) -> None:
        """Remove the group, which must have no process."""

    def grant(self, cores: Collection[int]) -> None:
        """Write cores, then quota and weight; see the base class."""
        with self._container.lock:
            self.set_cores(core_list(cores) or self._container.all_cores)
            self._set_quota(UNLIMITED)
            self._weight.set_foreground(max(1, len(cores)))
            self._container.note(self, cores)

    def send_to_background(self) -> None:
        """Take the weight, then lift quota and cores; see the base class."""
        with self._container.lock:
            self._weight.set_background()
            self._container.note(self, None, background=True)
            self._set_quota(UNLIMITED)

    def park(self) -> None:
        """Leave next to no quota; see the base class."""
        with self._container.lock:
            self._set_quota(PARKED_QUOTA_US)
            self._container.note(self, None)

    def lend(self, cores: Collection[int]) -> None:
        """Write cores and quota; the container weighs what it weighed, since these cores are another session's. See the base class."""
        with self._container.lock:
            self.set_cores(core_list(cores) or self._container.all_cores)
            self._set_quota(UNLIMITED)
            self._weight.set_foreground(max(1, len(cores)))

    def remove(self) -> None:
        """Remove the group, and hold nothing; see the base class."""
        with self._container.lock:
            try:
                self.remove_folders()
            finally:
                self._container.note(self, None)

    def set_cores(self, cores: str) -> None:
        """Write the cores unless they stand."""
        if cores != self._cores:
            self.write_cores(cores)
            self._cores = cores

    def _set_quota(self, quota_us: int) -> None:
        if quota_us != self._quota_us:
            self.write_quota(quota_us)
            self._quota_us = quota_us
