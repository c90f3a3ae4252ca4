"""Control groups of process sessions and environments, by which memory is bounded and the background is held.

The groups of a sandbox have names made of its folder. They lie beside each other, so that the kernel compares their weights.

| group of       | controller | what for                                      | made in                |
|----------------|------------|-----------------------------------------------|------------------------|
| a session      | `cpu`      | idle time only, see `background.py`           | the worker's own group |
| an environment | `memory`   | its bound on memory                           | that of all            |
|                | `freezer`  | pauses at its allowance, see `../memory/`     | the worker's own group |
| all            | `memory`   | a bound for all environments together         | the worker's own group |

In version 1 a group has a folder for each controller. In version 2 it has one for all, and a process is in one group only. So there
the group of an environment contains the groups of its sessions, where the worker can bound memory.

In version 2 a group that hands controllers down to those within it holds no processes itself, unless it is the root of all. So the worker
moves all processes of its own group into one within it, `tangram-worker`. It does so only if they are a single tree of processes, as in a
service of systemd with `Delegate=yes`, a container or a login. A worker that is started in a group of this name takes the one above for
its own.

What holds the namespaces of an environment has groups as a session has, since programs could trace it.

The worker makes them, and removes those of an environment; the fork server removes those of a session, and the worker does where that was
killed. A shell joins them by descriptors that the worker opens.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import logging
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace

import psutil

from workers.cpu import control_files, weight
from workers.cpu.memory.controls import Controls, ControlsV1, ControlsV2

log = logging.getLogger(__name__)

ROOT = "/sys/fs/cgroup"
LEAF = "tangram-worker"
_SLACK_BYTES = 1 << 20
_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A group that bounds the memory of an environment, or of all; `is_v2` where the groups of sessions are in it.

    `freezer` is the group that pauses the environment in version 1, if there is one.
    """

    folder: str
    memory_mb: int
    is_v2: bool
    freezer: str | None = None

    def make(self) -> None:
        """Make the group, without swap where the kernel counts it, and without an allowance. Raises `OSError`."""
        limit_bytes = self.memory_mb << 20
        os.makedirs(self.folder, exist_ok=True)
        with contextlib.suppress(OSError):
            # Before Linux 5.11, a group of version 1 bounds what is below it only where that is asked for.
            control_files.write(f"{self.folder}/memory.use_hierarchy", "1")
        if self.freezer is not None:
            os.makedirs(self.freezer, exist_ok=True)
        # Version 1 bounds memory and swap together, by a number that may never be the lower one.
        swap = ("swap.max", 0) if self.is_v2 else ("memsw.limit_in_bytes", limit_bytes)
        for name, most in (swap, ("max" if self.is_v2 else "limit_in_bytes", limit_bytes), swap):
            with contextlib.suppress(*([OSError] if name == swap[0] else [])):
                control_files.write(f"{self.folder}/memory.{name}", str(most))
        with contextlib.suppress(OSError):
            name, value = ("high", "max") if self.is_v2 else ("oom_control", "0")
            control_files.write(f"{self.folder}/memory.{name}", value)

    def hand_down(self, controllers: list[str]) -> None:
        """Let the groups of sessions have controllers. Raises `OSError`."""
        control_files.write(f"{self.folder}/cgroup.subtree_control", " ".join(f"+{name}" for name in controllers))

    def oom_kills(self) -> int:
        """Return how many processes the kernel has killed because the memory was full."""
        with contextlib.suppress(OSError):
            return control_files.keyed(f"{self.folder}/memory.{'events' if self.is_v2 else 'oom_control'}", "oom_kill")
        return 0

    def watch(self) -> int:
        """Begin to look whether the memory gets full; return what `was_full` is to be told."""
        with contextlib.suppress(OSError):
            if self.is_v2:
                return control_files.keyed(f"{self.folder}/memory.events", "oom")
            control_files.write(f"{self.folder}/memory.max_usage_in_bytes", "0")
        return 0

    def was_full(self, before: int) -> bool:
        """Return whether the memory was full; processes that the kernel ended at other times were ended for want of memory elsewhere."""
        with contextlib.suppress(OSError):
            if self.is_v2:
                return control_files.keyed(f"{self.folder}/memory.events", "oom") > before
            if control_files.keyed(f"{self.folder}/memory.oom_control", "oom_kill_disable"):
                return False  # it is held to an allowance, at which nothing is killed
            highest, bound = (int(control_files.read(f"{self.folder}/memory.{name}_in_bytes")) for name in ("max_usage", "limit"))
            return highest + _SLACK_BYTES > bound
        return True

    def controls(self) -> Controls | None:
        """Return the control files of an allowance beside the limit; None where the environment cannot be paused."""
        if self.is_v2:
            return ControlsV2(self.folder)
        return ControlsV1(self.folder, self.freezer) if self.freezer is not None else None

    def remove(self) -> None:
        """Remove the group, whose processes must have ended."""
        for folder in filter(None, (self.folder, self.freezer)):
            control_files.is_removed(folder)


@dataclass(frozen=True, slots=True)
class Groups:
    """Where the groups of a sandbox's sessions, and in `memory` of its environments, are; None where they cannot be made.

    Each is a prefix of the folders of groups, but `memory` the group of all. `around` are the groups in which a session is, first that of
    its environment; `freezer` is then that of its environment, too.
    """

    cpu: str | None = None
    memory: str | None = None
    freezer: str | None = None
    is_v2: bool = False
    around: tuple[str, ...] = ()

    def bound_all(self, memory_mb: int) -> None:
        """Make the group of all environments, where memory can be bounded. Raises `OSError`."""
        if self.memory is not None:
            group = MemoryGroup(self.memory, memory_mb, self.is_v2)
            group.make()
            if self.is_v2:
                group.hand_down(["memory"] if self.cpu is None else ["memory", "cpu"])

    def of_environment(self, name: str, memory_mb: int, *, adopts: bool = False) -> tuple[Groups, MemoryGroup | None]:
        """Return where the groups of an environment's sessions are, and its own group if its memory can be bounded. Raises `OSError`.

        One that `adopts` the group of the worker before leaves it as it is: what runs there must not pass its allowance meanwhile.
        """
        if self.memory is None:
            return self, None
        freezer = f"{self.freezer}-{name}" if self.freezer is not None else None
        group = MemoryGroup(f"{self.memory}/{name}", memory_mb, self.is_v2, freezer)
        around = (group.folder, self.memory)
        try:
            if not adopts or not os.path.exists(group.folder):
                group.make()
            if self.is_v2 and self.cpu is not None:
                group.hand_down(["cpu"])
                return replace(self, cpu=f"{group.folder}/session", around=around), group
        except OSError:
            group.remove()
            raise
        return replace(self, around=around, freezer=freezer), group

    @property
    def prefixes(self) -> list[str]:
        """Return what the folders of the groups of sessions begin with."""
        return [] if self.cpu is None else [self.cpu]

    def folders(self, supervisor: int) -> list[str]:
        """Return the folders of the group of a supervisor's session."""
        return [f"{prefix}-{supervisor}" for prefix in self.prefixes]

    def joined(self, supervisor: int) -> list[str]:
        """Return the folders of all groups that the processes of a session are in."""
        folders = self.folders(supervisor)
        if self.is_v2 and folders:
            return folders
        return [*folders, *self.around[:1], *filter(None, [self.freezer])]

    def make(self, supervisor: int) -> None:
        """Make the group of a supervisor's session. Raises `OSError`."""
        for folder in self.folders(supervisor):
            os.makedirs(folder, exist_ok=True)
        if self.cpu is not None:
            weight.set_foreground(f"{self.cpu}-{supervisor}")

    def remove_of(self, supervisor: int) -> None:
        """Remove the group of a supervisor's session."""
        for folder in self.folders(supervisor):
            control_files.is_removed(folder)

    def remove(self) -> None:
        """Remove what a worker that was killed has left. What it left paused goes on, so that it can end."""
        if self.freezer is not None:
            control_files.thaw(self.freezer)
        for prefix in self.prefixes:
            for folder in glob.glob(f"{glob.escape(prefix)}-*"):
                control_files.is_removed(folder)
        if self.memory is not None:
            for environment in glob.glob(f"{glob.escape(self.memory)}/*/") if self.is_v2 else ():
                with contextlib.suppress(OSError):
                    control_files.write(f"{environment}cgroup.freeze", "0")
            for pattern in ("/*/session-*", "/*/", ""):
                for folder in glob.glob(f"{glob.escape(self.memory)}{pattern}"):
                    control_files.is_removed(folder)


def find_groups(base: str | os.PathLike[str]) -> Groups:
    """Return where the sessions and environments of the sandbox with the folder `base` can have groups."""
    name = f"tangram-{hashlib.sha256(os.fsencode(base)).hexdigest()[:16]}"
    own = {controller: path.rstrip("/") for controller, path in control_files.paths_of(os.getpid()).items()}
    is_v2 = not {"cpu", "memory"} & own.keys() and "" in own
    if is_v2:
        own[""] = make_room(f"{ROOT}{own['']}", ("cpu", "memory")).removeprefix(ROOT)

    def place(controller: str, serves: Callable[[str], bool]) -> str | None:
        """Return where groups can be made and serve, by making one; None where they cannot."""
        path, above = (own.get(""), ROOT) if is_v2 else (own.get(controller), f"{ROOT}/{controller}")
        if path is None:
            return None
        trial = f"{above}{path}/{name}-trial"
        with contextlib.suppress(OSError):
            os.makedirs(trial, exist_ok=True)
            try:
                if serves(trial):
                    return f"{above}{path}/{name}"
            finally:
                control_files.is_removed(trial)
        return None

    cpu = place("cpu", _weighs)
    memory = place("memory", lambda folder: any(os.path.exists(f"{folder}/memory.{limit}") for limit in ("max", "limit_in_bytes")))
    freezer = None if is_v2 or memory is None else place("freezer", lambda folder: os.path.exists(f"{folder}/freezer.state"))
    return Groups(cpu, memory, freezer, is_v2)


def make_room(own: str, controllers: tuple[str, ...]) -> str:
    """Have the worker's own group of version 2 hand down what it has of these controllers; return the group in which others can be made.

    That is its own group, whether it could or not, or the one above if an earlier worker has made this one.
    """
    if os.path.basename(own) == LEAF:
        own = os.path.dirname(own)
    with contextlib.suppress(OSError):
        wanted = set(controllers).intersection(control_files.read(f"{own}/cgroup.controllers").split())
        missing = " ".join(f"+{name}" for name in wanted.difference(control_files.read(f"{own}/cgroup.subtree_control").split()))
        try:
            if missing:
                control_files.write(f"{own}/cgroup.subtree_control", missing)
        except OSError as error:
            if error.errno == errno.EBUSY and _is_one_tree(own):
                _make_way(own, missing)
    return own


def _is_one_tree(folder: str) -> bool:
    """Return whether all processes in a group have a parent there but one, so that they belong together. Raises `OSError`."""
    found = {int(pid) for pid in control_files.read(f"{folder}/cgroup.procs").split()}
    return 0 not in found and sum(_parent(pid) not in found for pid in found) == 1


def _parent(pid: int) -> int:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).ppid()
    return pid  # it has ended


def _make_way(own: str, missing: str) -> None:
    """Move all processes of a group into one within it, and have the group hand down what is `missing`; or leave it as it was."""
    leaf = f"{own}/{LEAF}"
    os.makedirs(leaf, exist_ok=True)
    try:
        for _ in range(_ROUNDS):  # some may start others meanwhile
            _move(own, leaf)
        control_files.write(f"{own}/cgroup.subtree_control", missing)
        log.info("control group %s hands down %s: its processes are in %s now", own, missing, LEAF)
    except OSError:
        _move(leaf, own)
        control_files.is_removed(leaf)
        raise


def _move(source: str, target: str) -> None:
    for pid in control_files.pids(source):
        with contextlib.suppress(ProcessLookupError):
            control_files.write(f"{target}/cgroup.procs", str(pid))


def _weighs(folder: str) -> bool:
    """Return True once a process was put in a group, and the group was sent to the background and taken back. Raises `OSError`."""
    with subprocess.Popen(["/bin/sh", "-c", "read -r line"], stdin=subprocess.PIPE, env={}) as child:
        try:
            control_files.write(f"{folder}/cgroup.procs", str(child.pid))
            weight.set_background(folder)
            weight.set_foreground(folder)
        finally:
            child.communicate()
    return True
