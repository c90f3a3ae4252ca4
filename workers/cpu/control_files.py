"""Files of the kernel: small reads and writes of control groups, and where their hierarchies are mounted.

The standard library only, since the fork server of the process sandbox imports this.
"""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def write(path: str, value: str) -> None:
    """Write one value to a control file. Raises `OSError`."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, value.encode())
    finally:
        os.close(descriptor)


def read(path: str) -> str:
    """Return the text of a control file. Raises `OSError`."""
    return read_bytes(path).decode()


def read_bytes(path: str) -> bytes:
    """Return what is in a file of the kernel's, which gives a page at a time. Raises `OSError`."""
    # This is most of what a walk over processes does, and twice as fast as with a file object.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = b""
        while chunk := os.read(descriptor, PAGE_BYTES):
            found += chunk
        return found
    finally:
        os.close(descriptor)


def keyed(path: str, key: str) -> int:
    """Return the number behind `key` in a file of lines `key number`; 0 where there is none."""
    for line in read(path).splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0


def pids(folder: str, name: str = "cgroup.procs") -> list[int]:
    """Return the processes, or threads, of a group, none where it is gone; those that this process cannot see are left out."""
    try:
        return [pid for pid in map(int, read(f"{folder}/{name}").split()) if pid]
    except OSError:
        return []


def pids_below(folder: str) -> list[int]:
    """Return the processes of a group and of all groups in it."""
    return [pid for parent, _, _ in os.walk(folder) for pid in pids(parent)]


def remove_group(folder: str) -> None:
    """Remove an empty group; nothing where it is gone."""
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(folder)


def is_removed(folder: str) -> bool:
    """Remove a group unless it is in use, and return whether it is gone."""
    with contextlib.suppress(OSError):
        os.rmdir(folder)
    return not os.path.exists(folder)


def thaw(prefix: str, files: Iterable[Sequence[str]] = ()) -> bool:
    """Let everything go on in the freezers of version 1 whose folders begin with `prefix`, and remove those that are not in use.

    An empty prefix is that of none. Write besides to each of `files`, by path and value. Return whether no freezer is left.
    """
    folders = glob.glob(f"{glob.escape(prefix)}-*") if prefix else []
    for path, value in (*((f"{folder}/freezer.state", "THAWED") for folder in folders), *files):
        with contextlib.suppress(OSError):
            write(path, value)
    return all([is_removed(folder) for folder in folders])


@dataclass(frozen=True, slots=True)
class Mounts:
    """Where the control groups are: `unified` for version 2, else a folder for each controller of version 1."""

    unified: Path | None
    by_controller: dict[str, Path]

    @classmethod
    def of_this_process(cls) -> Mounts:
        """Read them from /proc."""
        unified: Path | None = None
        by_controller: dict[str, Path] = {}
        for line in read("/proc/self/mountinfo").splitlines():
            left, _, right = line.partition(" - ")
            kind, _, options = right.split()[:3]
            point = Path(left.split()[4])
            if kind == "cgroup2":
                unified = unified or point
            elif kind == "cgroup":
                for controller in options.split(","):
                    by_controller.setdefault(controller, point)
        return cls(unified, by_controller)


def paths_of(pid: int) -> dict[str, str]:
    """Return the paths of a process's groups by controller, `""` standing for version 2. Raises `OSError`."""
    paths: dict[str, str] = {}
    for line in read(f"/proc/{pid}/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            paths[controller] = path
    return paths
