"""Control groups that bound the number of processes of a session, for a worker that is root.

The kernel holds root to no RLIMIT_NPROC. A sandbox has one group, named after its folder, and each keeper one below it,
which the keeper makes and removes. Where the worker may not make groups, there is no bound.
Rules: the standard library only; the keeper process imports this file too.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator

ROOT = "/sys/fs/cgroup"


def make_group(base: str | os.PathLike[str]) -> str | None:
    """Return the group of the sandbox with the folder `base`, made if need be; None where that cannot be."""
    name = f"tangram-{hashlib.sha256(os.fsencode(base)).hexdigest()[:16]}"
    for above in _candidates():
        group = f"{above}/{name}"
        with contextlib.suppress(OSError):
            os.makedirs(group, exist_ok=True)
            if _bounds_processes(group):
                return group
            os.rmdir(group)
    return None


def _bounds_processes(group: str) -> bool:
    """Return whether groups below `group` can bound processes; in the second version it must hand that on to them."""
    if os.path.exists(f"{group}/cgroup.subtree_control"):
        try:
            write_text(f"{group}/cgroup.subtree_control", "+pids")
        except OSError:
            return False
    return os.path.exists(f"{group}/pids.max")


def bounded_group(groups: str | None, keeper: int, processes: int) -> str | None:
    """Return a group below `groups` for the session of a keeper, which may have `processes`. Raises `OSError`."""
    if groups is None:
        return None
    group = f"{groups}/{keeper}"
    os.makedirs(group, exist_ok=True)
    write_text(f"{group}/pids.max", str(processes))
    return group


def write_text(path: str, text: str) -> None:
    """Write a file of the kernel's. Raises `OSError`."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def remove_group(group: str) -> None:
    """Remove a sandbox's group, and what killed keepers have left below it."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(group):
            if entry.is_dir():
                with contextlib.suppress(OSError):
                    os.rmdir(entry.path)
        os.rmdir(group)


def _candidates() -> Iterator[str]:
    """Yield the groups in which to make one: the worker's own, then the topmost."""
    with open("/proc/self/cgroup", encoding="utf-8") as file:
        lines = [line.rstrip("\n").split(":", 2) for line in file]
    for _, controllers, path in lines:
        if "pids" in controllers.split(","):
            yield from (f"{ROOT}/pids{path}".rstrip("/"), f"{ROOT}/pids")
    for _, controllers, path in lines:
        if not controllers:
            yield from (f"{ROOT}{path}".rstrip("/"), ROOT)
