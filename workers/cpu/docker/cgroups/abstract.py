"""What holds the processes of one session to a grant.

| state   | cores                                   | core-seconds a second                          |
|---------|-----------------------------------------|------------------------------------------------|
| parked  | those of the last grant                 | `PARKED_QUOTA_US` of a second, 0.5 %           |
| granted | the cores of the grant                  | all of them, or the share of the one           |

Quotas count over one second, the longest that kernels take: a command that needs less than its share of a second in all
is not slowed down at all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection

PERIOD_US = 1_000_000
PARKED_QUOTA_US = 5_000
UNLIMITED = -1


def quota_us(share: float, cores: int) -> int:
    """Return the core-microseconds a second of a grant; whole cores need no quota, their number is the limit."""
    return UNLIMITED if share >= 1.0 or not cores else max(1_000, round(share * cores * PERIOD_US))


def core_list(cores: Collection[int]) -> str:
    """Return cores as the kernel writes them: `0-2,5`."""
    ranges: list[list[int]] = []
    for core in sorted(cores):
        if ranges and core == ranges[-1][1] + 1:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in ranges)


class SessionGroup(ABC):
    """The group of one session's processes: its shell and whatever comes from it, however it hides."""

    @abstractmethod
    def add(self, pid: int) -> None:
        """Take a process in; what it starts from now on is in, too."""

    @abstractmethod
    def grant(self, cores: Collection[int], share: float) -> None:
        """Let the processes use these cores, or any where there are none."""

    @abstractmethod
    def park(self) -> None:
        """Take the cores back."""

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


class WrittenGroup(SessionGroup):
    """A session's group whose cores and quota are control files; what stands there already is not written again."""

    def __init__(self, all_cores: str, cores: str, quota_us: int) -> None:
        """Take note of all cores there are, and of the cores and the quota that stand."""
        self._all_cores, self._cores, self._quota_us = all_cores, cores, quota_us

    @abstractmethod
    def write_cores(self, cores: str) -> None:
        """Write the cores. Raises `OSError`."""

    @abstractmethod
    def write_quota(self, quota_us: int) -> None:
        """Write the core-microseconds of each period, or `UNLIMITED`. Raises `OSError`."""

    def grant(self, cores: Collection[int], share: float) -> None:
        """Write cores, then quota; see the base class."""
        wanted = core_list(cores) or self._all_cores
        if wanted != self._cores:
            self.write_cores(wanted)
            self._cores = wanted
        self._set_quota(quota_us(share, len(cores)))

    def park(self) -> None:
        """Leave next to no quota; see the base class."""
        self._set_quota(PARKED_QUOTA_US)

    def _set_quota(self, quota_us: int) -> None:
        if quota_us != self._quota_us:
            self.write_quota(quota_us)
            self._quota_us = quota_us


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
