"""The folder of a sandbox: one living sandbox has it, and what a dead one left in it goes."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

from workers.cpu.errors import SandboxInUse


def take_base(base: Path, folders: Sequence[str]) -> int:
    """Lock `base` for a sandbox, make its `folders` afresh, and return the lock's descriptor.

    Raises:
        SandboxInUse: another living sandbox has it.

    """
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(base / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise SandboxInUse(f"{base} belongs to another sandbox") from None
    for name in folders:
        if (base / name).exists():
            remove_tree(base / name)
        (base / name).mkdir(mode=0o700)
    return lock


def remove_tree(folder: Path) -> None:
    """Remove a folder and all in it, also where the program inside took the permissions away."""
    for parent, folders, _ in os.walk(folder, topdown=True):
        for name in folders:
            path = os.path.join(parent, name)
            mode = os.lstat(path).st_mode
            if stat.S_ISDIR(mode) and mode & 0o700 != 0o700:
                os.chmod(path, 0o700)
    os.chmod(folder, 0o700)
    shutil.rmtree(folder)
