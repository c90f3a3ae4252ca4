"""Control groups of process sessions: one a session, which bounds its processes and holds it in the background.

The groups of a sandbox are named after its folder and lie beside each other, so that the kernel compares their weights. A keeper
makes the one of its session and removes it; the nursery removes that of a keeper that was killed. In the first version a session has
a folder for each controller, in the second one for all.

| controller | what for                                                       | made in                                    |
|------------|----------------------------------------------------------------|--------------------------------------------|
| `pids`     | a bound on processes: RLIMIT_NPROC does not hold for root      | the worker's own group, else the topmost   |
| `cpu`      | idle time only, see `background.py`                            | the worker's own group                     |

Rules: the standard library only; the keeper process imports this file too.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass

from workers.cpu import weight

ROOT = "/sys/fs/cgroup"


@dataclass(frozen=True, slots=True)
class Groups:
    """Where the groups of a sandbox's sessions are, by controller; None where they cannot be made."""

    pids: str | None = None
    cpu: str | None = None

    def folders(self, keeper: int) -> list[str]:
        """Return the folders of the group of a keeper's session."""
        return [f"{prefix}-{keeper}" for prefix in dict.fromkeys((self.pids, self.cpu)) if prefix is not None]

    def make(self, keeper: int, processes: int) -> None:
        """Make the group of a keeper's session, of `processes` where it bounds them. Raises `OSError`."""
        for folder in self.folders(keeper):
            os.makedirs(folder, exist_ok=True)
        if self.pids is not None:
            write_text(f"{self.pids}-{keeper}/pids.max", str(processes))
        if self.cpu is not None:
            weight.set_foreground(f"{self.cpu}-{keeper}")

    def remove(self) -> None:
        """Remove what a worker that was killed has left."""
        for prefix in filter(None, (self.pids, self.cpu)):
            above, name = os.path.split(prefix)
            with contextlib.suppress(OSError):
                for entry in os.scandir(above):
                    if entry.name.startswith(f"{name}-"):
                        remove_folder(entry.path)


def find_groups(base: str | os.PathLike[str]) -> Groups:
    """Return where the sessions of the sandbox with the folder `base` can have groups."""
    name = f"tangram-{hashlib.sha256(os.fsencode(base)).hexdigest()[:16]}"
    own = _own_groups()
    pids = [f"{ROOT}/pids{own['pids']}", f"{ROOT}/pids"] if "pids" in own else []
    cpu = [f"{ROOT}/cpu{own['cpu']}"] if "cpu" in own else []
    if "" in own:
        pids, cpu = pids or [f"{ROOT}{own['']}", ROOT], cpu or [f"{ROOT}{own['']}"]
    found = Groups(_first(pids, name, lambda folder: os.path.exists(f"{folder}/pids.max")), _first(cpu, name, weight.has_weight))
    # In the second version a process is in one group only.
    is_split = found.cpu is not None and found.pids not in (None, found.cpu) and "cpu" not in own and "pids" not in own
    return Groups(found.pids) if is_split else found


def _own_groups() -> dict[str, str]:
    """Return the paths of this process's groups by controller, without a slash at their end; `""` stands for version 2."""
    own: dict[str, str] = {}
    with open("/proc/self/cgroup", encoding="utf-8") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            own |= dict.fromkeys(controllers.split(","), path.rstrip("/"))
    return own


def _first(folders: list[str], name: str, serves: Callable[[str], bool]) -> str | None:
    """Return where groups called `name` can be made and serve, by making one; None where they cannot."""
    for above in folders:
        trial = f"{above}/{name}-trial"
        with contextlib.suppress(OSError):
            os.makedirs(trial, exist_ok=True)
            try:
                if serves(trial):
                    return f"{above}/{name}"
            finally:
                os.rmdir(trial)
    return None


def join(folders: list[str]) -> None:
    """Put this process into the group that these folders are. Raises `OSError`."""
    for folder in folders:
        write_text(f"{folder}/cgroup.procs", "0")


def write_text(path: str, text: str) -> None:
    """Write a file of the kernel's. Raises `OSError`."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def remove_folder(folder: str) -> None:
    """Remove an empty group; nothing where it is in use."""
    with contextlib.suppress(OSError):
        os.rmdir(folder)
