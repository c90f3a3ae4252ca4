"""Files of a process environment, never beyond its root.

The path is resolved with all its links first, and the result must lie below the root. What was found is then opened step
by step from the root, without following a link: a program inside that swaps a folder for a link meanwhile gains nothing.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from workers.cpu.errors import PathIsDirectory, PathOutside
from workers.cpu.files import FLAGS, RegularFiles

FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Files(RegularFiles):
    """The files below `root`; relative paths start at `work`."""

    def __init__(self, root: Path, work: Path, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self.root, self.work = root, work

    def open_to_read(self, path: str) -> int:
        """Open a file below the root; see the base class."""
        return self._open(self._inside(path), os.O_RDONLY | FLAGS, makes_folders=False)

    def open_to_write(self, path: str) -> int:
        """Open or make a file below the root; see the base class."""
        return self._open(self._inside(path), os.O_WRONLY | os.O_CREAT | FLAGS, makes_folders=True)

    def _open(self, resolved: str, flags: int, *, makes_folders: bool) -> int:
        root = os.path.realpath(self.root)
        *folders, name = os.path.relpath(resolved, root).split(os.sep)
        here = os.open(root, FOLDER)
        try:
            for folder in folders:
                if makes_folders:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(folder, dir_fd=here)
                below = os.open(folder, FOLDER, dir_fd=here)
                os.close(here)
                here = below
            return os.open(name, flags, 0o644, dir_fd=here)
        finally:
            os.close(here)

    def _inside(self, path: str) -> str:
        root = os.path.realpath(self.root)
        resolved = os.path.realpath(os.path.join(self.work, path))
        if os.path.commonpath((root, resolved)) != root:
            raise PathOutside(f"{path} leads out of the environment")
        if resolved == root or (path.endswith("/") and not os.path.lexists(resolved)):
            raise PathIsDirectory(f"{path} names a folder")
        return resolved
