"""Grants through the engine, `docker update`, for workers that cannot write control files.

It is slower (a request to the engine for each grant and take-back) and coarser: a container has one grant, the union of
those of its running commands, and what belongs to a session is told by descent and not by group. Orphans, which have no descent,
are ended with a session's command only while no other session runs one. A container is in the background while all its
commands are; else those in the background run beside the others, on the cores of these.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

from workers.cpu.docker.cgroups.abstract import PARKED_QUOTA_US, PERIOD_US, ContainerGroup, SessionGroup, core_list
from workers.cpu.docker.cgroups.files import Mounts, keyed, paths_of, pids_below
from workers.cpu.process import tree
from workers.cpu.weight import V1

Update = Callable[[str, int, int, int], None]
"""Tells the engine a container's cores, quota, period and weight."""


class ContainerGroupEngine(ContainerGroup):
    """The grants of the container whose process 1 is `pid`; its control files are read, never written."""

    def __init__(self, mounts: Mounts, pid: int, all_cores: Collection[int], update: Update) -> None:
        paths = paths_of(pid)
        self._pid, self._update, self._all_cores = pid, update, frozenset(all_cores)
        if mounts.unified is not None and "cpu" not in mounts.by_controller:
            self._folder = f"{mounts.unified}{paths['']}"
            self._oom = (f"{self._folder}/memory.events", "oom_kill")
        else:
            self._folder = f"{mounts.by_controller['cpu']}{paths['cpu']}"
            self._oom = (f"{mounts.by_controller['memory']}{paths['memory']}/memory.oom_control", "oom_kill")
        self._lock = threading.Lock()
        self._held: dict[str, frozenset[int]] = {}
        self._in_background: set[str] = set()
        self._told: tuple[str, int, int, int] | None = None
        self.tell("", None)

    def tell(self, session: str, holding: frozenset[int] | None, *, background: bool = False) -> None:
        """Take note of what a session holds, None for nothing, and whether it is in the background; tell the engine what that is in all."""
        with self._lock:
            self._held.pop(session, None)
            self._in_background.discard(session)
            if holding is not None:
                self._held[session] = holding
            if background:
                self._in_background.add(session)
            held = frozenset[int]().union(*self._held.values())
            cores = held or self._all_cores
            # The engine takes 0 for "as it was", so that no quota is said as all the time there is.
            quota = len(cores) * PERIOD_US if self._held or self._in_background else PARKED_QUOTA_US
            # Weights are those of version 1 for the engine, whatever the version of control groups.
            shares = V1.background if self._in_background and not self._held else V1.of(len(held))
            wanted = (core_list(cores), quota, PERIOD_US, shares)
            if wanted != self._told:
                self._update(*wanted)
                self._told = wanted

    def session(self, name: str) -> SessionGroupEngine:
        """Make the group of a session; see the base class."""
        return SessionGroupEngine(self, name)

    def is_alone(self, session: str) -> bool:
        """Say whether no session but this one holds anything."""
        with self._lock:
            return not (self._held.keys() | self._in_background) - {session}

    def orphans(self) -> list[int]:
        """Return what process 1 has been handed, whichever session it came from."""
        return [process.pid for process in tree.descendants(self._pid)]

    def oom_kills(self) -> int:
        """Return the kernel's count; see the base class."""
        try:
            return keyed(*self._oom)
        except OSError:
            return 0

    def processes(self) -> list[int]:
        """Return all processes; see the base class."""
        return pids_below(self._folder)


class SessionGroupEngine(SessionGroup):
    """A session's shells and what descends from them."""

    def __init__(self, container: ContainerGroupEngine, name: str) -> None:
        self._container, self._name = container, name
        self._shells: list[int] = []
        self._used_s = self._found_s = 0.0

    def add(self, pid: int) -> None:
        """Take a shell in; see the base class."""
        self._shells = [shell for shell in self._shells if tree.read_process(shell) is not None] + [pid]

    def grant(self, cores: Collection[int]) -> None:
        """Have the engine grant it; see the base class."""
        self._container.tell(self._name, frozenset(cores))

    def send_to_background(self) -> None:
        """Have the engine weigh it less; see the base class."""
        self._container.tell(self._name, None, background=True)

    def park(self) -> None:
        """Have the engine take it back; see the base class."""
        self._container.tell(self._name, None)

    def processes(self) -> list[int]:
        """Return the shells and what is below them, and orphans while no other session holds anything."""
        return self._ids(tree.descendants)

    def _ids(self, walk: Callable[[int], list[tree.Process]]) -> list[int]:
        shells = [pid for pid in self._shells if tree.read_process(pid) is not None]
        orphans = self._container.orphans() if self._container.is_alone(self._name) else []
        return [*shells, *(process.pid for shell in shells for process in walk(shell)), *orphans]

    def cpu_s(self) -> float:
        """Return the core-seconds of all processes, as far as looks have met them or their parents have waited for them."""
        found = (tree.read_process(pid) for pid in self._ids(tree.unburied))
        found_s = sum(process.cpu_s for process in found if process is not None)
        # What ends without a parent that waits for it is in nobody's count any more.
        self._used_s += max(0.0, found_s - self._found_s)
        self._found_s = found_s
        return self._used_s

    def freeze(self) -> None:
        """Nothing that this user may do stops all at once; the kill goes round until none is left."""

    def thaw(self) -> None:
        """Nothing was stopped."""

    def remove(self) -> None:
        """Give back what the session held."""
        self._container.tell(self._name, None)
