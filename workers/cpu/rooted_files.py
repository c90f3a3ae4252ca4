"""Files of an environment, opened from outside as a command inside would open them.

| class         | root folder                                              | no path leads out, because                             |
|---------------|----------------------------------------------------------|--------------------------------------------------------|
| `RootedFiles` | the environment's own: a container's, or its namespaces' | the kernel resolves the path below it, see `root.py`   |
| `HostFiles`   | the host's, as its commands have it                      | nothing holds it back, nor the commands                |
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager

from workers.cpu.errors import FileUnusable
from workers.cpu.files import FLAGS, RegularFiles
from workers.cpu.root import open_in_root

FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_OF_A_PROCESS = re.compile(r"/proc/\d+/")
"""Such files give the worker more than a command: with them it could reach into the memory of what runs inside."""


class HostFiles(RegularFiles):
    """Files of the host."""

    def open(self, path: str, flags: int) -> int:
        """Open a file; see the base class."""
        if flags & os.O_CREAT:
            _make_folders(os.path.dirname(path), os.path.isdir, lambda folder: os.mkdir(folder, 0o755))
        return os.open(path, flags | FLAGS & ~os.O_NOFOLLOW, 0o644)


class RootedFiles(RegularFiles):
    """Files below the folder whose descriptor `root` gives; `as_inside` gives this thread the rights of who runs inside."""

    def __init__(
        self,
        max_bytes: int,
        home: str,
        root: Callable[[], AbstractContextManager[int]],
        as_inside: Callable[[], AbstractContextManager[None]],
    ) -> None:
        super().__init__(max_bytes, home)
        self._root, self._as_inside = root, as_inside

    def open(self, path: str, flags: int) -> int:
        """Open a file; see the base class."""
        with self._root() as root, self._as_inside():
            if flags & os.O_CREAT:
                _make_folders(os.path.dirname(path), lambda folder: _has_folder(root, folder), lambda folder: _make_folder(root, folder))
            descriptor = open_in_root(root, path, flags | FLAGS & ~os.O_NOFOLLOW, 0o644 if flags & os.O_CREAT else 0)
        if _OF_A_PROCESS.match(os.readlink(f"/proc/self/fd/{descriptor}")):
            os.close(descriptor)
            raise FileUnusable(f"{path} is of a process, and can be read by commands only")
        return descriptor


def _make_folders(folder: str, exists: Callable[[str], bool], make: Callable[[str], None]) -> None:
    """Make a folder, and those above it that are missing."""
    missing: list[str] = []
    while not exists(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):
            make(folder)


def _has_folder(root: int, folder: str) -> bool:
    try:
        os.close(open_in_root(root, folder, FOLDER))
    except FileNotFoundError:
        return False
    return True


def _make_folder(root: int, folder: str) -> None:
    above, name = os.path.split(folder)
    parent = open_in_root(root, above, FOLDER)
    try:
        os.mkdir(name, 0o755, dir_fd=parent)
    finally:
        os.close(parent)
