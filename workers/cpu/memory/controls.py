"""What the kernel does for the memory of one environment: it measures it, bounds it, and stops what runs.

| asked            | version 1                                               | version 2                         |
|------------------|---------------------------------------------------------|-----------------------------------|
| a bound          | `memory.limit_in_bytes`, `memory.oom_control` = 1       | `memory.high`                     |
| is it met?       | `memory.failcnt` has changed                            | `memory.events` has changed       |
| stop, go on      | `freezer.state` of a group beside it                    | `cgroup.freeze`                   |
| the limit itself | `memory.limit_in_bytes`, `memory.oom_control` = 0       | `memory.max`, which stays         |

*Why version 1 has a freezer.* With the killer off, a program that touches a page beyond the bound sleeps until the bound is raised. A
system call beyond it fails instead: fork, exec and writes to memory files end with ENOMEM. So programs are to be frozen before they meet
the bound. The kernel could tell by an event that a lower use was passed. But each action would change that figure, and whoever changes it
waits until no processor uses the old one. A frozen program does not even die by SIGKILL on version 1, so whoever ends programs lets them
go on first.

*What is held* is what the kernel cannot take back: everything but pages of files that no program has mapped. What is mapped could be
taken back, too, but the program would read it again at each step.

No thread and no clock: `allowance.py` decides when, `watcher.py` waits.
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from workers.cpu.control_files import read, write

ATTRIBUTE = "user.tangram.allowance_mb"


@dataclass(frozen=True, slots=True)
class Use:
    """What a group uses, bytes: `held` cannot be taken back by the kernel, `cache` can."""

    held: int
    cache: int


class Controls(ABC):
    """The control files of one environment, with its memory in `folder`. All raise `OSError` once the group is gone."""

    _USED: ClassVar[str]
    _MEETS: ClassVar[str]

    def __init__(self, folder: str) -> None:
        self.folder, self._kept = folder, _Kept(folder)

    def remember(self, allowance_mb: int) -> None:
        """Leave a successor of this worker the allowance, with the group."""
        os.setxattr(self.folder, ATTRIBUTE, str(allowance_mb).encode())

    def remembered_mb(self) -> int:
        """Return the allowance that the worker before this one has left. Raises `OSError` where it left none."""
        return int(os.getxattr(self.folder, ATTRIBUTE))

    def use(self) -> Use:
        """Measure. A large file that is removed meanwhile must not read as memory that is held: the lower of two readings counts."""
        before, cache = self.used(), self._cache()
        used = min(before, self.used())
        return Use(used - min(cache, used), min(cache, used))

    @abstractmethod
    def _cache(self) -> int:
        """Return how many bytes the kernel could take back."""

    @abstractmethod
    def bound(self, most_bytes: int) -> None:
        """Stop what grows beyond `most_bytes`, cache included. The kernel drops cache first. Raises `OSError` where too much is held."""

    @abstractmethod
    def unbound(self, limit_bytes: int) -> None:
        """Leave nothing but the environment's limit, at which the kernel ends programs."""

    @abstractmethod
    def freeze(self) -> None:
        """Stop every program."""

    @property
    @abstractmethod
    def thawing(self) -> tuple[str, str]:
        """The file and the value that let them go on."""

    def thaw(self) -> None:
        """Let them go on."""
        write(*self.thawing)

    def used(self) -> int:
        """Return how many bytes are used, cache included. This takes microseconds."""
        return int(self._kept.read(self._USED))

    def meets(self) -> bytes:
        """Return what changes when the bound is met."""
        return self._kept.read(self._MEETS)

    @abstractmethod
    def restart_peak(self) -> None:
        """Have `peak` count from now on, where it can."""

    @abstractmethod
    def peak(self) -> int | None:
        """Return the most bytes since `restart_peak`, cache included; None where the kernel does not say."""

    def close(self) -> None:
        """Give descriptors back."""
        self._kept.close()


class _Kept:
    """Control files of a folder that stay open."""

    def __init__(self, folder: str) -> None:
        self._folder, self._descriptors = folder, dict[str, int]()

    def read(self, name: str) -> bytes:
        return os.pread(self._open(name, os.O_RDONLY), 4096, 0)

    def write(self, name: str, value: bytes) -> None:
        """Write to a file that has not been read before."""
        os.pwrite(self._open(name, os.O_RDWR), value, 0)

    def _open(self, name: str, how: int) -> int:
        if name not in self._descriptors:
            self._descriptors[name] = os.open(f"{self._folder}/{name}", how | os.O_CLOEXEC)
        return self._descriptors[name]

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])


def _numbers(path: str) -> dict[str, int]:
    return {name: int(value) for name, _, value in (line.partition(" ") for line in read(path).splitlines()) if value}


class ControlsV1(Controls):
    """Version 1: the group's folders below the controllers `memory` and `freezer`."""

    _USED, _MEETS, _PEAK = "memory.usage_in_bytes", "memory.failcnt", "memory.max_usage_in_bytes"

    def __init__(self, memory: str, freezer: str) -> None:
        super().__init__(memory)
        self._freezer = freezer

    def _cache(self) -> int:
        found = _numbers(f"{self.folder}/memory.stat")
        return max(0, found["total_active_file"] + found["total_inactive_file"] - found["total_mapped_file"])

    def bound(self, most_bytes: int) -> None:
        write(f"{self.folder}/memory.oom_control", "1")
        self._limit(most_bytes)

    def unbound(self, limit_bytes: int) -> None:
        self._limit(limit_bytes)
        write(f"{self.folder}/memory.oom_control", "0")

    def _limit(self, most_bytes: int) -> None:
        raises = most_bytes > int(read(f"{self.folder}/memory.limit_in_bytes"))
        # The bound on memory and swap together, if there is one, may never be the lower one.
        for name in ("memsw.limit", "limit") if raises else ("limit", "memsw.limit"):
            with contextlib.suppress(*([OSError] if name != "limit" else [])):
                write(f"{self.folder}/memory.{name}_in_bytes", str(most_bytes))

    def freeze(self) -> None:
        """Freeze. A program that sleeps for memory is frozen once it wakes; see the base class."""
        write(f"{self._freezer}/freezer.state", "FROZEN")

    @property
    def thawing(self) -> tuple[str, str]:
        return f"{self._freezer}/freezer.state", "THAWED"

    def restart_peak(self) -> None:
        self._kept.write(self._PEAK, b"0")

    def peak(self) -> int:
        return int(self._kept.read(self._PEAK))


class ControlsV2(Controls):
    """Version 2: the group's folder. The kernel slows down what is above `memory.high`, until it is frozen."""

    _USED, _MEETS, _PEAK = "memory.current", "memory.events", "memory.peak"

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self._peak_before: int | None = None

    def _cache(self) -> int:
        found = _numbers(f"{self.folder}/memory.stat")
        return max(0, found["active_file"] + found["inactive_file"] - found["file_mapped"]) + found.get("slab_reclaimable", 0)

    def bound(self, most_bytes: int) -> None:
        write(f"{self.folder}/memory.high", str(most_bytes))

    def unbound(self, limit_bytes: int) -> None:
        write(f"{self.folder}/memory.high", "max")

    def freeze(self) -> None:
        write(f"{self.folder}/cgroup.freeze", "1")

    @property
    def thawing(self) -> tuple[str, str]:
        return f"{self.folder}/cgroup.freeze", "0"

    def restart_peak(self) -> None:
        """Have the kernel count anew for one descriptor; see the base class.

        Before Linux 6.12 it counts from the beginning of the group. What it says then is of this time only where it has grown.
        """
        try:
            self._kept.write(self._PEAK, b"reset\n")
            self._peak_before = 0
        except OSError:
            self._peak_before = self._read_peak()

    def peak(self) -> int | None:
        return most if self._peak_before is not None and (most := self._read_peak()) > self._peak_before else None

    def _read_peak(self) -> int:
        return int(self._kept.read(self._PEAK))
