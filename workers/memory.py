"""How much memory this process may use: the machine's, or less where a control group limits it.

A limit holds for all groups below it, so every group from the process's own up to the root counts. Both versions of control groups
are read, since a machine may have both mounted. Within a container the mount begins at the container's group.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import psutil

MIB = 1 << 20

MOST_KEPT_MB = 1024

_LIMIT = {"cgroup": "memory.limit_in_bytes", "cgroup2": "memory.max"}


def usable_mb(proc: Path = Path("/proc/self")) -> int:
    """Return the MiB that this process may use; `proc` is its folder of the kernel's."""
    return min(psutil.virtual_memory().total, *_limits(proc), 1 << 63) // MIB


def for_environments_mb(there_mb: int | None = None) -> int:
    """Return the MiB of `there_mb` that all environments may use together: the rest is for the worker and what is beside it.

    By default `there_mb` is what this process may use.
    """
    there_mb = usable_mb() if there_mb is None else there_mb
    return there_mb - min(there_mb // 8, MOST_KEPT_MB)


def _limits(proc: Path) -> Iterator[int]:
    """Yield the limits of the groups that the process is in, in bytes."""
    try:
        groups = (proc / "cgroup").read_text().splitlines()
        mounts = (proc / "mountinfo").read_text().splitlines()
    except OSError:
        return  # not Linux
    own = {kind: group for kind, group in map(_own_group, groups) if kind}
    for mount in mounts:
        place, _, filesystem = mount.partition(" - ")
        kind, _, options = filesystem.split(" ", 2)
        if kind in own and (kind == "cgroup2" or "memory" in options.split(",")):
            root, folder = place.split(" ")[3:5]
            yield from _upwards(Path(folder), PurePosixPath(root), own[kind], _LIMIT[kind])


def _own_group(line: str) -> tuple[str, PurePosixPath]:
    """Read a line of `/proc/self/cgroup`: the file system that has the group's memory limit, empty for none, and the group."""
    _, controllers, group = line.split(":", 2)
    kind = "cgroup2" if not controllers else "cgroup" if "memory" in controllers.split(",") else ""
    return kind, PurePosixPath(group)


def _upwards(folder: Path, root: PurePosixPath, group: PurePosixPath, name: str) -> Iterator[int]:
    """Yield the limits from a group up to the root of the mount at `folder`."""
    below = group.relative_to(root) if group.is_relative_to(root) and ".." not in group.parts else PurePosixPath()
    for part in (below, *below.parents):
        try:
            limit = (folder / part / name).read_text().strip()
        except OSError:
            continue  # the root of version 2 has no limit
        if limit.isdigit():
            yield int(limit)
