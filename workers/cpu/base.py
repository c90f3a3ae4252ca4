"""The folder of a sandbox, from its first use to the close: one living sandbox has it, and what a dead one left in it goes.

A worker that is killed leaves cleanup processes, which end its commands. They hold a lock of their own in the folder until
they are done. A successor that started earlier would find files made anew where it has just removed them.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from workers.cpu.abstract import Loss
from workers.cpu.errors import ProcessesLeft, SandboxError, SandboxInUse
from workers.cpu.handover.protocol import Kept, take_over

if TYPE_CHECKING:
    from workers.cpu.shell.environment import ShellEnvironment

log = logging.getLogger(__name__)

CLEANUP_LIMIT_S, CLEANUP_PAUSE_S = 30.0, 0.01


def take_base(
    base: Path, folders: Sequence[str], keep_s: float, note_loss: Callable[[Loss], object] = lambda loss: None
) -> tuple[int, int, Kept | None]:
    """Lock `base` for a sandbox. Return the descriptors of the locks, its own and that of cleanup, and what an earlier worker has left.

    Where it has left nothing, the `folders` are made afresh. `note_loss` is told of each environment that was kept in another version.
    Raises `SandboxInUse` when another living sandbox has it.
    """

    def tell(reason: str) -> None:
        log.warning("%s", reason)
        for folder in (base / "environments").iterdir():
            note_loss(Loss(folder.name, reason))

    lock = lock_base(base)
    kept = take_over(base, keep_s, tell)
    if kept is None:
        cleanup = await_cleanup(base, lock)
        make_afresh(base, folders)
        return lock, cleanup, None
    for name in folders:
        (base / name).mkdir(mode=0o700, exist_ok=True)
    return lock, kept.lock, kept


def lock_base(base: Path) -> int:
    """Lock `base` for a sandbox, and return the lock's descriptor. Raises `SandboxInUse`."""
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(base / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise SandboxInUse(f"{base} belongs to another sandbox") from None
    return lock


def await_cleanup(base: Path, lock: int) -> int:
    """Wait until the cleanup processes of a dead worker have ended. Return the descriptor of their lock, for ours to hold.

    Raises `SandboxInUse` when they took longer than `CLEANUP_LIMIT_S` seconds; the `lock` of the base is given back.
    """
    cleanup = os.open(base / "cleanup", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + CLEANUP_LIMIT_S
    while True:
        try:
            fcntl.flock(cleanup, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(CLEANUP_PAUSE_S)
                continue
            os.close(cleanup)
            os.close(lock)
            raise SandboxInUse(f"the processes of a dead worker in {base} do not end") from None
        return cleanup


def make_afresh(base: Path, folders: Sequence[str]) -> None:
    """Make the `folders` of `base` anew, without what was in them."""
    for name in folders:
        if (base / name).exists():
            remove_tree(base / name)
        (base / name).mkdir(mode=0o700)


def close_all(environments: Sequence[ShellEnvironment], last: Sequence[Callable[[], None]], locks: Sequence[int]) -> None:
    """Close the environments of a sandbox, then what is to be closed `last`, each whatever became of the others, and then its `locks`.

    Raises `ProcessesLeft` when something could not be ended or removed.
    """
    # All are asked first, so that their grace periods run at the same time.
    for environment in environments:
        environment.hang_up()
    problems: list[str] = []
    for close in (*(environment.close for environment in environments), *last):
        try:
            close()
        except (SandboxError, OSError) as error:
            problems.append(str(error))
    for lock in locks:
        os.close(lock)
    if problems:
        raise ProcessesLeft("; ".join(problems))


def remove_tree(folder: Path | str) -> None:
    """Remove a folder and all in it, also where the program inside took the permissions away, and however deep its folders are.

    A folder within a folder is first moved up to the top. So neither the length of a path nor the depth of a recursion bounds what can be
    removed.
    """
    _let_in(folder)
    word = secrets.token_hex(8)
    moved = (f"{folder}/{word}.{number}" for number in itertools.count())
    for path in _folders_left(folder):
        _let_in(path)
    while left := [entry.path for entry in _entries(folder)]:
        for path in left:
            for inner in _folders_left(path):
                _let_in(inner)
                os.rename(inner, next(moved))
            os.rmdir(path)
    os.rmdir(folder)


def _folders_left(folder: Path | str) -> list[str]:
    """Remove what is in a folder; return its folders that are not empty."""
    left = []
    for entry in _entries(folder):
        if not entry.is_dir(follow_symlinks=False):
            os.unlink(entry.path)
            continue
        try:
            os.rmdir(entry.path)
        except OSError:
            left.append(entry.path)
    return left


def _let_in(folder: Path | str) -> None:
    if os.lstat(folder).st_mode & 0o700 != 0o700:
        os.chmod(folder, 0o700)


def _entries(folder: Path | str) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as found:
        return list(found)
