"""A process environment: a root folder with a work folder and a folder for temporary files, and its sessions.

| folder                         | what for                                                                    |
|--------------------------------|-----------------------------------------------------------------------------|
| `<base>/environments/<id>/work` | where sessions start, and HOME                                             |
| `<base>/environments/<id>/tmp` | TMPDIR                                                                      |
| `<base>/control/`              | protocol files of sessions, out of the way of commands that walk their home |
"""

from __future__ import annotations

import os
import shutil
import stat
import threading
from collections.abc import Callable
from pathlib import Path

from workers.cpu.abstract import Environment, EnvironmentSpec, ExecRequest
from workers.cpu.errors import EnvironmentGone, ProcessesLeft
from workers.cpu.process.cores import CoreMap
from workers.cpu.process.execution import ProcessExecution
from workers.cpu.process.files import Files
from workers.cpu.process.session import Session, SessionSetup


class ProcessEnvironment(Environment):
    """One environment of a `ProcessSandbox`, which tells it how sessions are made; `forget` takes it off the books."""

    def __init__(
        self,
        spec: EnvironmentSpec,
        files: Files,
        setup: SessionSetup,
        core_map: CoreMap,
        forget: Callable[[str], None],
    ) -> None:
        self._spec, self._files, self._setup, self._core_map, self._forget = spec, files, setup, core_map, forget
        self._lock = threading.Lock()
        self._sessions: dict[str, Session] = {}
        self._closed = False
        self._closing = threading.Lock()
        self._cleared = False

    @property
    def spec(self) -> EnvironmentSpec:
        """Return what the environment was opened with."""
        return self._spec

    @property
    def work_folder(self) -> Path:
        """Return the folder in which sessions start."""
        return self._files.work

    def start(self, request: ExecRequest) -> ProcessExecution:
        """Admit a command; see the base class."""
        with self._lock:
            self._check_open()
            session = self._sessions.get(request.session)
            if session is None:
                session = self._sessions[request.session] = Session(self._setup)
        return ProcessExecution(session, request, self._core_map)

    def read_file(self, path: str) -> bytes:
        """Return a file's bytes; see the base class."""
        self._check_open()
        return self._files.read(path)

    def write_file(self, path: str, data: bytes, mode: int | None = None) -> None:
        """Write a file; see the base class."""
        self._check_open()
        self._files.write(path, data, mode)

    def _check_open(self) -> None:
        if self._closed:
            raise EnvironmentGone(f"environment {self._spec.id} is closed")

    def hang_up(self) -> None:
        """Begin to close: refuse commands, and tell every session to end. Returns at once."""
        with self._lock:
            self._closed = True
            sessions = list(self._sessions.values())
        for session in sessions:
            session.hang_up()

    def close(self) -> None:
        """End every process and remove every file; see the base class.

        Raises:
            ProcessesLeft: a process could not be ended; the files are gone all the same.

        """
        self.hang_up()
        with self._closing:
            if self._cleared:
                return
            self._cleared = True
            try:
                self._end_sessions()
            finally:
                remove_tree(self._files.root)
                self._forget(self._spec.id)

    def _end_sessions(self) -> None:
        left = 0
        for session in self._sessions.values():
            try:
                session.close()
            except ProcessesLeft:
                left += 1
        if left:
            raise ProcessesLeft(f"environment {self._spec.id}: the processes of {left} sessions could not be ended")


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
