"""What holds the processes of one session to a grant: control groups, one for each session below that of its container.

| state      | cores                                   | core-seconds a second                          |
|------------|-----------------------------------------|------------------------------------------------|
| parked     | those of the last grant                 | `PARKED_QUOTA_US` of a second, 0.5 %           |
| granted    | the cores of the grant                  | all of them                                    |
| lent       | those of other sessions' grants, or of  | all of them                                    |
|            | a request to a server                   |                                                |
| background | any; where another session of the       | what no group in the foreground wants          |
|            | container holds a grant, its cores      |                                                |

The kernel divides a core among containers first, and then among the sessions of each (`workers/cpu/weight.py`). A container
therefore has the weight of all cores that its sessions are granted, and is in the background only while none of them holds a
grant. A session in the background shares the cores of its container's granted sessions: on other cores it would run with the
weight of the whole container.

Processes that outlive their command are parked by a quota. A weight alone would let them use all of an idle core, and an idle
environment must cost next to nothing. Quotas are counted over one second, the longest period that the kernel takes.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable

from workers.cpu import weight
from workers.cpu.control_files import pids, pids_below
from workers.cpu.memory.controls import Controls

PERIOD_US = 1_000_000
PARKED_QUOTA_US = 5_000
UNLIMITED = -1
RIGHTS_LIMIT_S, PAUSE_S = 10.0, 0.002


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


class ContainerGroup(ABC):
    """The group that the engine has made for a container; `folder` holds its weight."""

    def __init__(self, folder: str, all_cores: str) -> None:
        self.folder, self.all_cores = folder, all_cores
        self.lock = threading.Lock()
        self._granted: dict[SessionGroup, frozenset[int]] = {}
        self._lent: dict[SessionGroup, frozenset[int]] = {}
        self._in_background: set[SessionGroup] = set()
        self._weight = Weighed(folder)

    @abstractmethod
    def session(self, name: str) -> SessionGroup:
        """Make the group of a session, or take over that of an earlier worker."""

    @abstractmethod
    def oom_kills(self) -> int:
        """Return how many processes the kernel has killed because the container's memory was full. Raises `OSError` once it is gone."""

    @abstractmethod
    def controls(self) -> Controls:
        """Return the control files of the container's memory."""

    def processes(self) -> list[int]:
        """Return the ids of all of the container's processes, as the worker sees them."""
        return pids_below(self.folder)

    def strays(self, sessions: Iterable[str]) -> set[int]:
        """Return the ids of those that are in the group of none of these sessions."""
        return set(self.processes()).difference(*(pids(f"{self.folder}/{name}") for name in sessions))

    def note(self, session: SessionGroup, cores: Collection[int] | None, *, background: bool = False) -> None:
        """Note the grant of a session, None for none, and whether it is in the background; weigh the container by that."""
        self._forget(session)
        if cores is not None:
            self._granted[session] = frozenset(cores)
        if background:
            self._in_background.add(session)
        self._weigh()

    def note_lent(self, session: SessionGroup, cores: Collection[int]) -> None:
        """Note what is lent to a session. The container is weighed by that where no session has a grant: a request has the cores."""
        self._forget(session)
        self._lent[session] = frozenset(cores)
        self._weigh()

    def _forget(self, session: SessionGroup) -> None:
        self._granted.pop(session, None)
        self._lent.pop(session, None)
        self._in_background.discard(session)

    def _weigh(self) -> None:
        # What is lent is the same for all sessions, and is in what the granted ones have.
        held = list(self._granted.values()) or list(self._lent.values())[:1]
        if held:
            self._weight.set_foreground(sum(max(1, len(cores)) for cores in held))
        elif self._in_background:
            self._weight.set_background()
        shared = core_list(frozenset[int]().union(*held)) if all(held) else ""
        for each in self._in_background:
            each.set_cores(shared or self.all_cores)


class SessionGroup(ABC):
    """The group of one session's processes: its shell and all that it starts. Values that stand already are not written again."""

    def __init__(self, container: ContainerGroup, folder: str, cores: str, quota_us: int) -> None:
        """Manage the group whose processes and weight are in `folder`, and which has these cores and this quota."""
        self._container, self.folder, self._weight = container, folder, Weighed(folder)
        self._cores, self._quota_us = cores, quota_us

    def take_in(self, shell: int) -> None:
        """Add the process of a shell that the engine has just started. Raises `OSError`.

        At first the process has capabilities that a worker may lack, until the engine's runtime drops them. Meanwhile the kernel refuses to
        have such a worker change its cores.
        """
        deadline = time.monotonic() + RIGHTS_LIMIT_S
        while True:
            try:
                return self.add(shell)
            except PermissionError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(PAUSE_S)

    @abstractmethod
    def add(self, pid: int) -> None:
        """Take a process in; what it starts from now on is in, too."""

    @abstractmethod
    def write_cores(self, cores: str) -> None:
        """Write the cores. Raises `OSError`."""

    @abstractmethod
    def write_quota(self, quota_us: int) -> None:
        """Write the core-microseconds of each period, or `UNLIMITED`. Raises `OSError`."""

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
    def remove_folders(self) -> None:
        """Remove the group, which must have no process; nothing where it is gone."""

    def processes(self) -> list[int]:
        """Return the ids of its processes, as the worker sees them."""
        return pids(self.folder)

    def grant(self, cores: Collection[int]) -> None:
        """Let the processes use these cores, or any where there are none."""
        with self._container.lock:
            self.set_cores(core_list(cores) or self._container.all_cores)
            self._set_quota(UNLIMITED)
            self._weight.set_foreground(max(1, len(cores)))
            self._container.note(self, cores)

    def send_to_background(self) -> None:
        """Send the processes to the background, on any core."""
        with self._container.lock:
            self._weight.set_background()
            self._container.note(self, None, background=True)
            self._set_quota(UNLIMITED)

    def park(self) -> None:
        """Take the cores back."""
        with self._container.lock:
            self._set_quota(PARKED_QUOTA_US)
            self._container.note(self, None)

    def lend(self, cores: Collection[int]) -> None:
        """Have the processes use cores of other sessions' grants, or of a request."""
        with self._container.lock:
            self.set_cores(core_list(cores) or self._container.all_cores)
            self._set_quota(UNLIMITED)
            self._weight.set_foreground(max(1, len(cores)))
            self._container.note_lent(self, cores)

    def remove(self) -> None:
        """Remove the group, which must have no process, and hold nothing; nothing where it is gone."""
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
