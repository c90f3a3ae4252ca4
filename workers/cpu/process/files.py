"""Files of an environment, read and written from outside, never beyond its root.

The path is resolved with all its links first, and the result must lie below the root. A program inside that swaps a
folder for a link between the check and the opening is not kept out: it is a process of the same user and could read
that file by itself (see the sandbox's docstring).
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from workers.cpu.errors import FileTooLarge, FileUnusable, NoSuchFile, PathIsDirectory, PathOutside, SandboxError

# O_NONBLOCK: opening a FIFO must not wait for its other end.
_FLAGS = os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Files:
    """The files below `root`; relative paths start at `work`. At most `max_bytes` pass in one piece."""

    root: Path
    work: Path
    max_bytes: int

    def read(self, path: str) -> bytes:
        """Return a file's bytes; errors as in `Environment.read_file`."""
        try:
            with open(os.open(self._inside(path), os.O_RDONLY | _FLAGS), "rb") as file:
                self._check_regular(path, file.fileno())
                # A file of /proc or one that grows may be longer than its size says.
                data = file.read(self.max_bytes + 1)
        except OSError as error:
            raise _explained(path, error) from error
        self._check_size(path, len(data))
        return data

    def write(self, path: str, data: bytes, mode: int | None) -> None:
        """Write a file; errors as in `Environment.write_file`."""
        self._check_size(path, len(data))
        try:
            target = self._inside(path)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with open(os.open(target, os.O_WRONLY | os.O_CREAT | _FLAGS, 0o644), "wb", buffering=0) as file:
                self._check_regular(path, file.fileno())
                file.truncate(0)
                view = memoryview(data)
                while view:
                    view = view[file.write(view) :]
                if mode is not None:
                    os.fchmod(file.fileno(), mode)
        except OSError as error:
            raise _explained(path, error) from error

    def _inside(self, path: str) -> str:
        if not path or "\0" in path:
            raise FileUnusable(f"{path!r} is no path")
        root = os.path.realpath(self.root)
        resolved = os.path.realpath(os.path.join(self.work, path))
        if os.path.commonpath((root, resolved)) != root:
            raise PathOutside(f"{path} leads out of the environment")
        if resolved == root or (path.endswith("/") and not os.path.lexists(resolved)):
            raise PathIsDirectory(f"{path} names a folder")
        return resolved

    def _check_regular(self, path: str, descriptor: int) -> None:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise PathIsDirectory(f"{path} is a folder")
        if not stat.S_ISREG(status.st_mode):
            raise FileUnusable(f"{path} is no regular file")

    def _check_size(self, path: str, size: int) -> None:
        if size > self.max_bytes:
            raise FileTooLarge(f"{path} is larger than {self.max_bytes} bytes, the most that passes in one piece")


def _explained(path: str, error: OSError) -> SandboxError:
    """Return the project's error for one of the operating system."""
    if isinstance(error, SandboxError):
        return error
    if isinstance(error, FileNotFoundError):
        return NoSuchFile(f"{path} does not exist")
    if isinstance(error, IsADirectoryError):
        return PathIsDirectory(f"{path} is a folder")
    return FileUnusable(f"{path}: {error.strerror}")
