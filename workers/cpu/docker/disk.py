"""What a container has written to disk, counted as the host pays for it.

Counted are the files of its own layer, of its volumes and of its control folder, and files that have no name any more but
are still open or mapped. Each counts with the blocks that it takes, and with one at least: millions of empty files fill a disk, too.

Not seen are nameless files whose only descriptor is under way between two processes.

Where the layer's folder cannot be reached from here, the engine is asked for the sum of its files' sizes instead.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path

BLOCK_BYTES = 512
LEAST_BYTES = 4096
MOST_LEVELS = 256
HOST_ROOT = "/proc/1/root"
"""The host's files, for a worker that is in a container and shares the host's processes."""


def reachable(folder: str) -> str | None:
    """Return where this process sees a folder of the engine's host; None where it does not."""
    return next((path for path in (folder, f"{HOST_ROOT}{folder}") if folder and os.access(path, os.R_OK | os.X_OK)), None)


def taken_bytes(folders: Iterable[str | Path]) -> float:
    """Return what the files below folders take, infinity where some lie deeper than `MOST_LEVELS`.

    No link is followed, and what vanishes meanwhile takes nothing.
    """
    return sum(_size_below(str(folder)) for folder in folders)


def _size_below(top: str) -> float:
    """Walk through a folder, level by level with a descriptor for each: a path could lead elsewhere meanwhile."""
    size, levels = 0, [level] if (level := _level(top, None)) else []
    try:
        while levels:
            folder, names = levels[-1]
            if not names:
                os.close(levels.pop()[0])
                continue
            name = names.pop()
            try:
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            except OSError:
                continue
            size += _size(status)
            if stat.S_ISDIR(status.st_mode):
                if len(levels) == MOST_LEVELS:
                    return float("inf")
                levels += [level] if (level := _level(name, folder)) else []
        return size
    finally:
        for folder, _ in levels:
            os.close(folder)


def _level(name: str, above: int | None) -> tuple[int, list[str]] | None:
    """Open a folder and list it; None where that cannot be done."""
    try:
        folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    except OSError:
        return None
    try:
        return folder, os.listdir(folder)
    except OSError:
        os.close(folder)
        return None


def nameless_bytes(roots: Iterable[str], pids: Iterable[int]) -> int:
    """Return what files take that have no name any more and that some of these processes have open or mapped.

    Files count that are on the disk of one of `roots`; others are in memory.
    """
    devices: set[int] = set()
    for root in roots:
        with contextlib.suppress(OSError):
            devices.add(os.stat(root).st_dev)
    found: dict[tuple[int, int], int] = {}
    for pid in pids:
        for path in (*_open(pid), *_mapped(pid)):
            with contextlib.suppress(OSError):
                status = os.stat(path)
                if status.st_nlink == 0 and status.st_dev in devices:
                    found[status.st_dev, status.st_ino] = _size(status)
    return sum(found.values())


def _open(pid: int) -> list[str]:
    """Return paths to the files that a process has open."""
    try:
        return [f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        return []


def _mapped(pid: int) -> list[str]:
    """Return paths to the files without a name that a process has mapped, one for each however often it is.

    To follow them takes CAP_CHECKPOINT_RESTORE or CAP_SYS_ADMIN.
    """
    found: dict[tuple[bytes, bytes], str] = {}
    try:
        with open(f"/proc/{pid}/maps", "rb") as file:
            for line in file:
                if line.endswith(b" (deleted)\n"):
                    fields = line.split(None, 5)
                    found.setdefault((fields[3], fields[4]), f"/proc/{pid}/map_files/{_plain(fields[0])}")
    except OSError:
        return []
    return list(found.values())


def _plain(span: bytes) -> str:
    """Return a span of addresses as the folder of mappings names it: without leading zeros."""
    first, _, last = span.partition(b"-")
    return f"{int(first, 16):x}-{int(last, 16):x}"


def _size(status: os.stat_result) -> int:
    return max(LEAST_BYTES, status.st_blocks * BLOCK_BYTES)
