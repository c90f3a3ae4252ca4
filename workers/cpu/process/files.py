"""Files of a process environment, never beyond its root.

The path is resolved with all its links first, and the result must lie below the root. A program inside that swaps a
folder for a link between the check and the opening is not kept out: it is a process of the same user and could read
that file by itself (see the sandbox's docstring).
"""

from __future__ import annotations

import os
from pathlib import Path

from workers.cpu.errors import PathIsDirectory, PathOutside
from workers.cpu.files import FLAGS, RegularFiles


class Files(RegularFiles):
    """The files below `root`; relative paths start at `work`."""

    def __init__(self, root: Path, work: Path, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self.root, self.work = root, work

    def open_to_read(self, path: str) -> int:
        """Open a file below the root; see the base class."""
        return os.open(self._inside(path), os.O_RDONLY | FLAGS)

    def open_to_write(self, path: str) -> int:
        """Open or make a file below the root; see the base class."""
        target = self._inside(path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        return os.open(target, os.O_WRONLY | os.O_CREAT | FLAGS, 0o644)

    def _inside(self, path: str) -> str:
        root = os.path.realpath(self.root)
        resolved = os.path.realpath(os.path.join(self.work, path))
        if os.path.commonpath((root, resolved)) != root:
            raise PathOutside(f"{path} leads out of the environment")
        if resolved == root or (path.endswith("/") and not os.path.lexists(resolved)):
            raise PathIsDirectory(f"{path} names a folder")
        return resolved
