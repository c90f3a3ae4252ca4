"""How the processes of a session are held in the background: they get only time that no command in the foreground wants.

| means       | in the background, a session's processes                               | needs                                        |
|-------------|------------------------------------------------------------------------|----------------------------------------------|
| `cgroup`    | are in a control group of next to no weight, on any core               | a control group that the worker may write    |
| `autogroup` | are SCHED_IDLE, their autogroups (sched(7)) have nice 19, on any core  | CAP_SYS_ADMIN and CAP_SYS_NICE, or, where    |
|             |                                                                        | autogroups are off, RLIMIT_NICE of 20        |
| `affinity`  | share the last core                                                    | nothing                                      |

Weights count level by level: first a core is divided among groups, then each group's part among its processes. Each call
of setsid(2) makes an autogroup. So the policy SCHED_IDLE alone has no effect between two sessions, and a group's weight has.
A process that calls setsid(2) in the background leaves its autogroup; the next sample of the session finds it.

A hand-over takes `tree.PLACE_LIMIT_S` at most, or the time of two walks. A process that forks without end may escape it. `follow`
puts right what each later sample of the command finds.

What the worker sends to the background it must be able to take back, which the kernel does not allow to everybody:
`trial.py` finds what works.
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
from workers.cpu.weight import Means

MEANS: tuple[Means, ...] = ("cgroup", "autogroup", "affinity")
LOW, ORDINARY = "19", "0"


class Background:
    """One means, by default affinity. `cores` are all that commands may use."""

    means: ClassVar[Means] = "affinity"

    def __init__(self, cores: Iterable[int]) -> None:
        self.cores = tuple(sorted(cores))

    @property
    def background_cores(self) -> Collection[int]:
        """Return the cores of what is in the background."""
        return self.cores

    def send(self, members: Members) -> None:
        """Leave all processes of a session only time that nobody else wants."""
        self.pin(members, self.background_cores)

    def recall(self, members: Members, cores: Collection[int]) -> None:
        """Bring all processes of a session to the foreground, on `cores` and with the weight of one."""
        self.pin(members, cores)

    def pin(self, members: Members, cores: Collection[int]) -> None:
        """Hold every thread of a session to `cores`."""
        wanted = frozenset(cores)
        tree.place(lambda: self._threads(members), members.nearest, lambda thread: _pin(thread, wanted))

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
        return any(process.pid != members.shell for process in members.settled()[0])


class GroupBackground(Background):
    """By the weight of the session's control group, called `prefix` and the supervisor's id.

    Where that is in groups `around` it, such as that of its environment, the kernel compares these first. Each weighs as much as its
    sessions in the foreground do together.
    """

    means = "cgroup"

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _weights: ClassVar[dict[str, dict[str, int]]] = {}
    """The cores of the groups in each group, by its folder."""

    def __init__(self, cores: Iterable[int], prefix: str, around: tuple[str, ...] = ()) -> None:
        super().__init__(cores)
        self._prefix, self._around = prefix, around

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
        return [*_ids_in(f"{folder}/{name}"), *below], is_all

    def has_others(self, members: Members) -> bool:
        """Read the group; see the base class."""
        return any(pid != members.shell for pid in _ids_in(f"{self._folder(members)}/cgroup.procs"))

    def _folder(self, members: Members) -> str:
        return f"{self._prefix}-{members.supervisor}"


class AutogroupBackground(Background):
    """By the policy of each thread, and the weight of each autogroup."""

    means = "autogroup"

    def send(self, members: Members) -> None:
        """See the base class; a policy is inherited, so each scan finds what appeared since the one before."""
        self._each(members, True, LOW, self.cores)

    def recall(self, members: Members, cores: Collection[int]) -> None:
        """See the base class.

        A thread that is SCHED_IDLE becomes SCHED_OTHER, whatever its policy was before it was sent to the background. Another
        policy was chosen by the program in the background, and stays.
        """
        self._each(members, False, ORDINARY, cores)

    def _each(self, members: Members, idle: bool, nice: str, cores: Collection[int]) -> None:
        sessions: set[int] = set()
        wanted = frozenset(cores)

        def scan() -> tuple[list[int], bool]:
            found, is_all = members.settled()
            for process in found:
                if process.session not in sessions:
                    sessions.add(process.session)
                    _set_autogroup(process.pid, nice)
            return [thread for process in found for thread in tree.threads_of(process)], is_all

        def put(thread: int) -> bool:
            was_pinned = _pin(thread, wanted)
            return _set_idle(thread, idle) or was_pinned

        tree.place(scan, members.nearest, put)

    def follow(self, found: Iterable[tree.Process], cores: Collection[int], *, background: bool) -> None:
        """Set the policy of each thread too, and in the background the weight of each autogroup; see the base class."""
        found = list(found)
        super().follow(found, cores, background=background)
        for process in {process.session: process for process in found}.values() if background else ():
            _set_autogroup(process.pid, LOW)
        for thread in (thread for process in found for thread in tree.threads_of(process)):
            with contextlib.suppress(OSError):
                _set_idle(thread, background)


class AffinityBackground(Background):
    """By the last core. What is in the background shares it, also with a command that is granted it."""

    @property
    def background_cores(self) -> Collection[int]:
        """Return the last core; see the base class."""
        return self.cores[-1:]


def background_of(means: Means, cores: Iterable[int], groups: Groups) -> Background:
    """Return the background by one means; `cgroup` needs a group for `cpu`."""
    if means == "cgroup":
        assert groups.cpu is not None, "the caller has found one"
        return GroupBackground(cores, groups.cpu, groups.around if groups.is_v2 else ())
    return AutogroupBackground(cores) if means == "autogroup" else AffinityBackground(cores)


def _set_weight(folder: str, cores: int) -> None:
    if cores:
        weight.set_foreground(folder, cores)
    else:
        weight.set_background(folder)


def _set_autogroup(pid: int, nice: str) -> None:
    with contextlib.suppress(OSError):
        control_files.write(f"/proc/{pid}/autogroup", nice)


def _pin(thread: int, cores: frozenset[int]) -> bool:
    """Hold a thread to `cores`; return whether it was not. Raises `OSError`."""
    if os.sched_getaffinity(thread) == cores:
        return False
    os.sched_setaffinity(thread, cores)
    return True


def _set_idle(thread: int, idle: bool) -> bool:
    """Make a thread SCHED_IDLE, or SCHED_OTHER if it is that; return whether it was to be changed. Raises `OSError`."""
    is_idle = os.sched_getscheduler(thread) & ~os.SCHED_RESET_ON_FORK == os.SCHED_IDLE
    if is_idle != idle:
        os.sched_setscheduler(thread, os.SCHED_IDLE if idle else os.SCHED_OTHER, os.sched_param(0))
    return is_idle != idle


def _ids_in(path: str) -> list[int]:
    """Return the ids in a file of a group, none where that is gone; those that this process cannot see are left out."""
    try:
        return [number for number in map(int, tree.read_bytes(path).split()) if number]
    except OSError:
        return []
