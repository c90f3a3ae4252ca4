"""The control groups that this process is in, and the cores that they leave it.

A limit holds for all groups below it, so every group from the process's own up to the root counts. Both versions of control groups
are read, since a machine may have both mounted. Within a container the mount begins at the container's group.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

PROC = Path("/proc/self")


def usable_cores(most: int, proc: Path = PROC) -> int:
    """Return how many whole cores the quotas of CPU time leave of `most`, at least one: an affinity mask knows nothing of quotas."""
    for kind, folder in own_groups("cpu", proc):
        names = ("cpu.max",) if kind == "cgroup2" else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        try:
            quota, period = " ".join((folder / name).read_text() for name in names).split()
        except (OSError, ValueError):
            continue  # the root has none
        if quota.isdigit():  # and neither "max" nor -1
            most = min(most, int(quota) // int(period))
    return max(1, most)


def own_groups(controller: str, proc: Path = PROC) -> Iterator[tuple[str, Path]]:
    """Yield file system and folder of each group in which a controller may limit the process with the folder `proc`."""
    try:
        groups = (proc / "cgroup").read_text().splitlines()
        mounts = (proc / "mountinfo").read_text().splitlines()
    except OSError:
        return  # not Linux
    own = {kind: group for kind, group in (_own_group(line, controller) for line in groups) if kind}
    for mount in mounts:
        place, _, filesystem = mount.partition(" - ")
        kind, _, options = filesystem.split(" ", 2)
        if kind in own and (kind == "cgroup2" or controller in options.split(",")):
            root, folder = place.split(" ")[3:5]
            for part in _upwards(PurePosixPath(root), own[kind]):
                yield kind, Path(folder) / part


def _own_group(line: str, controller: str) -> tuple[str, PurePosixPath]:
    """Read a line of `/proc/self/cgroup`: the file system that has the group's limits, empty for none, and the group."""
    _, controllers, group = line.split(":", 2)
    kind = "cgroup2" if not controllers else "cgroup" if controller in controllers.split(",") else ""
    return kind, PurePosixPath(group)


def _upwards(root: PurePosixPath, group: PurePosixPath) -> Iterator[PurePosixPath]:
    """Yield the paths from a group up to the root of a mount."""
    below = group.relative_to(root) if group.is_relative_to(root) and ".." not in group.parts else PurePosixPath()
    yield from (below, *below.parents)
