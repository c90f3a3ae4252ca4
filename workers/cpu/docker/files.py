"""Files of a container: the worker opens them with the container's user and group, so a file that it makes is the user's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager

from workers.cpu.docker.container import Container
from workers.cpu.docker.init import WORK
from workers.cpu.errors import DiskSpent, FilesUnreachable
from workers.cpu.files import RootedFiles, root_of
from workers.cpu.root import as_user


class ContainerFiles(RootedFiles):
    """The files of `container`; relative paths start at the work folder."""

    def __init__(self, container: Container, uid: int, gid: int, max_bytes: int) -> None:
        super().__init__(max_bytes, WORK, lambda: root_of(container.pid, container.has_ended), self._as_user)
        self._container, self._uid, self._gid = container, uid, gid

    def open_to_write(self, path: str) -> int:
        if self._container.written_mb > self._container.disk_mb:
            raise DiskSpent(f"{path}: the environment has written all of the {self._container.disk_mb} MB that it may have on disk")
        return super().open_to_write(path)

    @contextmanager
    def _as_user(self) -> Iterator[None]:
        """Let this thread's files be opened as the container's user would."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(as_user(self._uid, self._gid))
            except PermissionError as error:
                raise FilesUnreachable(f"the container's {error}") from error
            yield
