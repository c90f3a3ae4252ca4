"""Files of a container, opened from outside as its own user would open them.

No path leads out of the container, and the worker opens files with the container's user and group (`workers/cpu/root.py`). It can
therefore read and write just what a command could, and a file that it makes is the user's.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager

from workers.cpu.docker.container import Container
from workers.cpu.docker.init import WORK
from workers.cpu.errors import DiskSpent, FilesUnreachable, PathIsDirectory
from workers.cpu.files import FLAGS, RegularFiles
from workers.cpu.root import as_user, open_in_root

FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


class ContainerFiles(RegularFiles):
    """The files of `container`; relative paths start at the work folder."""

    def __init__(self, container: Container, uid: int, gid: int, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self._container, self._uid, self._gid = container, uid, gid

    def open_to_read(self, path: str) -> int:
        """Open a file of the container; see the base class."""
        with self._root() as root, self._as_user():
            return open_in_root(root, _absolute(path), os.O_RDONLY | FLAGS & ~os.O_NOFOLLOW)

    def open_to_write(self, path: str) -> int:
        """Open or make a file of the container; see the base class."""
        target = _absolute(path)
        if self._container.written_mb > self._container.disk_mb:
            raise DiskSpent(f"{path}: the environment has written all of the {self._container.disk_mb} MB that it may have on disk")
        with self._root() as root, self._as_user():
            if path.endswith("/"):
                raise PathIsDirectory(f"{path} names a folder")
            self._make_folders(root, os.path.dirname(target))
            return open_in_root(root, target, os.O_WRONLY | os.O_CREAT | FLAGS & ~os.O_NOFOLLOW, 0o644)

    def _make_folders(self, root: int, folder: str) -> None:
        """Make the folders of a path that are missing, each inside the one before."""
        missing: list[str] = []
        while (parent := _folder(root, folder)) is None:
            folder, name = os.path.split(folder)
            missing.append(name)
        os.close(parent)
        for name in reversed(missing):
            parent = open_in_root(root, folder, FOLDER)
            try:
                os.mkdir(name, 0o755, dir_fd=parent)
            except FileExistsError:
                pass
            finally:
                os.close(parent)
            folder = os.path.join(folder, name)

    @contextmanager
    def _root(self) -> Iterator[int]:
        try:
            root = os.open(f"/proc/{self._container.pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise FilesUnreachable(f"the container's files cannot be reached: {error.strerror}") from error
        try:
            if self._container.has_ended():
                # The id may be another process's by now.
                raise FilesUnreachable("the container's files cannot be reached: it has ended")
            yield root
        finally:
            os.close(root)

    @contextmanager
    def _as_user(self) -> Iterator[None]:
        """Let this thread's files be opened as the container's user would."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(as_user(self._uid, self._gid))
            except PermissionError as error:
                raise FilesUnreachable(f"the container's {error}") from error
            yield


def _folder(root: int, path: str) -> int | None:
    """Open a folder; None where there is none."""
    try:
        return open_in_root(root, path, FOLDER)
    except FileNotFoundError:
        return None


def _absolute(path: str) -> str:
    return os.path.join(WORK, path)
