"""Files of an environment as they pass in and out: only regular ones, up to a size, with errors that say which file.

They are opened from outside as a command inside would open them. Relative paths and `~` begin at the home of the environment.

| class         | root folder                                              | no path leads out, because                             |
|---------------|----------------------------------------------------------|--------------------------------------------------------|
| `RootedFiles` | the environment's own: a container's, or its namespaces' | the kernel resolves the path below it, see `root.py`   |
| `HostFiles`   | the host's, as its commands have it                      | nothing holds it back, nor the commands                |
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from workers.cpu.errors import DiskSpent, FilesUnreachable, FileTooLarge, FileUnusable, NoSuchFile, PathIsDirectory, SandboxError
from workers.cpu.libc import libc
from workers.cpu.root import open_in_root

_OURS = (errno.EIO, errno.ENOSPC, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE)
"""Errors of the node, whatever was asked for."""

PIECE_BYTES = 1 << 20

# O_NONBLOCK: opening a FIFO must not wait for its other end. O_NOCTTY: a terminal of a program's must not become this process's own,
# which the program could then send signals by.
_FLAGS = os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW | os.O_CLOEXEC

_TMPFS = 0x01021994
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_OF_A_PROCESS = re.compile(r"/proc/\d+/")
"""Such files give the worker more than a command: with them it could reach into the memory of what runs inside."""


class RegularFiles(ABC):
    """Reads and writes files, at most `max_bytes` in one piece, and makes the folders above one that is written."""

    def __init__(self, max_bytes: int, home: str) -> None:
        self._max_bytes, self._home = max_bytes, home

    @abstractmethod
    def open(self, path: str, flags: int) -> int:
        """Return a descriptor of an absolute path; a file that is made has its folders made, too. Raises `OSError`, or ours."""

    def open_to_write(self, path: str) -> int:
        """Return a descriptor for writing. Raises `OSError`, or ours."""
        target = self._absolute(path)
        if path.endswith("/"):
            raise PathIsDirectory(f"{path} names a folder")
        return self.open(target, os.O_WRONLY | os.O_CREAT)

    def _absolute(self, path: str) -> str:
        if path == "~" or path.startswith("~/"):
            path = f"{self._home}{path[1:]}"
        return os.path.join(self._home, path)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Return a file's bytes, or `length` of them from `offset` on; errors as in `Environment.read_file`."""
        check_path(path)
        most = self._max_bytes + 1 if length is None else min(length, self._max_bytes + 1)
        try:
            with open(self.open(self._absolute(path), os.O_RDONLY), "rb") as file:
                _check_regular(path, file.fileno())
                # A file of /proc or one that grows may be longer than its size says.
                file.seek(offset)
                # In pieces: some files of the kernel refuse one read that large.
                data = b"".join(iter(lambda: file.read(min(most - file.tell() + offset, PIECE_BYTES)), b""))
        except OSError as error:
            raise _explained(path, error) from error
        self._check_size(path, len(data))
        return data

    def write(self, path: str, data: bytes, mode: int | None, offset: int = 0) -> None:
        """Write a file from `offset` on; errors as in `Environment.write_file`."""
        check_path(path)
        self._check_size(path, len(data))
        try:
            with open(self.open_to_write(path), "wb", buffering=0) as file:
                _check_regular(path, file.fileno())
                if (size := os.fstat(file.fileno()).st_size) < offset:
                    raise FileUnusable(f"{path} has {size} bytes, too few to go on behind byte {offset}")
                file.truncate(offset)
                file.seek(offset)
                try:
                    view = memoryview(data)
                    while view:
                        view = view[file.write(view) :]
                except OSError as error:
                    if error.errno == errno.ENOSPC and self._is_own_memory(file.fileno()):
                        raise DiskSpent(f"{path}: {error.strerror}") from error
                    raise
                if mode is not None:
                    os.fchmod(file.fileno(), mode)
        except OSError as error:
            raise _explained(path, error) from error

    def _is_own_memory(self, descriptor: int) -> bool:
        """Return whether a file is in memory that the environment has for files, such as `/dev/shm`, and not on the node's disk."""
        fields = (ctypes.c_long * 32)()
        if libc.fstatfs(descriptor, fields) or fields[0] != _TMPFS:
            return False
        home = self.open(self._home, os.O_RDONLY | os.O_DIRECTORY)
        try:
            return os.fstat(home).st_dev != os.fstat(descriptor).st_dev
        finally:
            os.close(home)

    def _check_size(self, path: str, size: int) -> None:
        if size > self._max_bytes:
            raise FileTooLarge(f"{path} is larger than {self._max_bytes} bytes, the most that passes in one piece")


class HostFiles(RegularFiles):
    """Files of the host."""

    def open(self, path: str, flags: int) -> int:
        if flags & os.O_CREAT:
            _make_folders(os.path.dirname(path), os.path.isdir, lambda folder: os.mkdir(folder, 0o755))
        return os.open(path, flags | _FLAGS & ~os.O_NOFOLLOW, 0o644)


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
        with self._root() as root, self._as_inside():
            if flags & os.O_CREAT:
                _make_folders(os.path.dirname(path), lambda folder: _has_folder(root, folder), lambda folder: _make_folder(root, folder))
            descriptor = open_in_root(root, path, flags | _FLAGS & ~os.O_NOFOLLOW, 0o644 if flags & os.O_CREAT else 0)
        if _OF_A_PROCESS.match(os.readlink(f"/proc/self/fd/{descriptor}")):
            os.close(descriptor)
            raise FileUnusable(f"{path} is of a process, and can be read by commands only")
        return descriptor


@contextmanager
def root_of(pid: int, has_ended: Callable[[], bool]) -> Iterator[int]:
    """Give a descriptor of the root folder of a process of the environment. Raises `FilesUnreachable`, also where it `has_ended`."""
    try:
        root = os.open(f"/proc/{pid}/root", _FOLDER)
    except OSError as error:
        raise FilesUnreachable(f"the environment's files cannot be reached: {error.strerror}") from error
    try:
        if has_ended():
            # The id may be another process's by now.
            raise FilesUnreachable("the environment's files cannot be reached: its processes have just ended")
        yield root
    finally:
        os.close(root)


def check_path(path: str) -> None:
    """Refuse what no system can name."""
    try:
        is_path = bool(path) and b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:  # half of a surrogate pair, which models write
        is_path = False
    if not is_path:
        raise FileUnusable(f"{path!r} is no path")


def _check_regular(path: str, descriptor: int) -> None:
    status = os.fstat(descriptor)
    if stat.S_ISDIR(status.st_mode):
        raise PathIsDirectory(f"{path} is a folder")
    if not stat.S_ISREG(status.st_mode):
        raise FileUnusable(f"{path} is no regular file")


def _explained(path: str, error: OSError) -> SandboxError:
    """Return the project's error for one of the operating system."""
    if isinstance(error, SandboxError):
        return error
    if isinstance(error, FileNotFoundError):
        return NoSuchFile(f"{path} does not exist")
    if isinstance(error, IsADirectoryError):
        return PathIsDirectory(f"{path} is a folder")
    return (FilesUnreachable if error.errno in _OURS else FileUnusable)(f"{path}: {error.strerror}")


def _make_folders(folder: str, exists: Callable[[str], bool], make: Callable[[str], None]) -> None:
    missing: list[str] = []
    while not exists(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):
            make(folder)


def _has_folder(root: int, folder: str) -> bool:
    try:
        os.close(open_in_root(root, folder, _FOLDER))
    except FileNotFoundError:
        return False
    return True


def _make_folder(root: int, folder: str) -> None:
    above, name = os.path.split(folder)
    parent = open_in_root(root, above, _FOLDER)
    try:
        os.mkdir(name, 0o755, dir_fd=parent)
    finally:
        os.close(parent)
