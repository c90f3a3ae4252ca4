"""How the processes of a session are held in the background: they get only time that no command in the foreground wants.

| means      | in the background, a session's processes                 | needs                                     |
|------------|----------------------------------------------------------|-------------------------------------------|
| `cgroup`   | are in a control group of next to no weight, on any core | a control group that the worker may write |
| `affinity` | share the last core, also with a command that is granted it | nothing                                |

Weights count level by level: first a core is divided among groups, then each group's part among its processes. Each call
of setsid(2) makes an autogroup (sched(7)). So the policy SCHED_IDLE has no effect between two sessions, and a group's weight has.

A hand-over takes `tree.PLACE_LIMIT_S` at most, or the time of two walks. A process that forks without end may escape it. `follow`
puts right what each later sample of the command finds.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Collection, Iterable
from typing import ClassVar

from workers.cpu import control_files, weight
from workers.cpu.process import tree
from workers.cpu.process.groups import Groups
from workers.cpu.process.members import Members


class Background:
    """By affinity. `cores` are all that commands may use."""

    def __init__(self, cores: Iterable[int]) -> None:
        self.cores = tuple(sorted(cores))

    @property
    def background_cores(self) -> Collection[int]:
        """Return the cores of what is in the background."""
        return self.cores[-1:]

    def send(self, members: Members) -> None:
        """Leave all processes of a session only time that nobody else wants."""
        self.pin(members, self.background_cores)

    def recall(self, members: Members, cores: Collection[int]) -> None:
        """Bring all processes of a session to the foreground, on `cores` and with the weight of one."""
        self.pin(members, cores)

    def pin(self, members: Members, cores: Collection[int]) -> None:
        """Hold every thread of a session to `cores`."""
        tree.place(lambda: self._threads(members), members.nearest, cores)

    def _threads(self, members: Members) -> tuple[list[int], bool]:
        """Return the threads of a session that are found, and whether that surely is all."""
        found, is_all = members.settled()
        return [thread for process in found for thread in tree.threads_of(process)], is_all

    def weigh(self, members: Members, cores: int) -> None:
        """Have a session in the foreground count for so many cores, where cores are divided by weights; by default nothing."""
        return

    def follow(self, found: Iterable[tree.Process], cores: Collection[int], *, background: bool) -> None:
        """Put right those of `found` processes that the last hand-over missed, or that have left the background since.

        In the foreground `cores` are theirs; a program may hold a thread to some of these by itself. None says nothing of cores.
        """
        allowed = frozenset(self.background_cores if background else cores)
        for thread in (thread for process in found for thread in tree.threads_of(process)) if allowed else ():
            with contextlib.suppress(OSError):
                if not os.sched_getaffinity(thread) <= allowed:
                    os.sched_setaffinity(thread, allowed)

    def has_others(self, members: Members) -> bool:
        """Return whether anything but the shell is left of a session."""
        return members.has_others()


class GroupBackground(Background):
    """By the weight of the session's control group, called `prefix` and the supervisor's id.

    Where that is in groups `around` it, such as that of its environment, the kernel compares these first. Each weighs as much as its
    sessions in the foreground do together.
    """

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _weights: ClassVar[dict[str, dict[str, int]]] = {}
    """The cores of the groups in each group, by its folder."""

    def __init__(self, cores: Iterable[int], prefix: str, around: tuple[str, ...] = ()) -> None:
        super().__init__(cores)
        self._prefix, self._around = prefix, around

    @property
    def background_cores(self) -> Collection[int]:
        """Return every core; see the base class."""
        return self.cores

    def send(self, members: Members) -> None:
        """Take the weight, then widen the mask; see the base class."""
        self._write(members, 0)
        super().send(members)

    def recall(self, members: Members, cores: Collection[int]) -> None:
        """Narrow the mask, then give the weight back; see the base class."""
        super().recall(members, cores)
        self.weigh(members, 1)

    def weigh(self, members: Members, cores: int) -> None:
        """Write the weight of so many cores; see the base class."""
        self._write(members, cores)

    def _write(self, members: Members, cores: int) -> None:
        """Weigh a session by its cores, 0 for the background, and then what is around it."""
        folder = self._folder(members)
        with contextlib.suppress(OSError), self._lock:
            _set_weight(folder, cores)
            for group in self._around:
                living = {other: count for other, count in self._weights.get(group, {}).items() if os.path.exists(other)}
                self._weights[group] = living | {folder: cores}
                folder, cores = group, sum(self._weights[group].values())
                _set_weight(folder, cores)

    def _threads(self, members: Members) -> tuple[list[int], bool]:
        """Find what is in the group, and what has left it but is still below the supervisor; see the base class."""
        folder = self._folder(members)
        name = "cgroup.threads" if os.path.exists(f"{folder}/cgroup.threads") else "tasks"
        below, is_all = super()._threads(members)
        return [*control_files.pids(folder, name), *below], is_all

    def has_others(self, members: Members) -> bool:
        """Read the group, of which nothing is missed while processes end; see the base class."""
        return any(pid != members.shell for pid in control_files.pids(self._folder(members)))

    def _folder(self, members: Members) -> str:
        return f"{self._prefix}-{members.supervisor}"


def background_of(cores: Iterable[int], groups: Groups) -> Background:
    """Return the background by a control group where there is one for `cpu`, else by affinity."""
    if groups.cpu is None:
        return Background(cores)
    return GroupBackground(cores, groups.cpu, groups.around if groups.is_v2 else ())


def _set_weight(folder: str, cores: int) -> None:
    if cores:
        weight.set_foreground(folder, cores)
    else:
        weight.set_background(folder)
