"""An environment of the process sandbox: its work folder, temporary files, and its sessions.

| folder                         | what for                                                                    |
|--------------------------------|-----------------------------------------------------------------------------|
| `<base>/environments/<id>/work` | where sessions start, and HOME                                             |
| `<base>/environments/<id>/tmp` | TMPDIR                                                                      |
| `<base>/control/`              | protocol files of sessions, out of the way of commands that walk their home |
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from workers.cpu.abstract import EnvironmentSpec
from workers.cpu.base import remove_tree
from workers.cpu.leftovers import Leftovers
from workers.cpu.process.files import Files
from workers.cpu.process.groups import MemoryGroup
from workers.cpu.shell.environment import ShellEnvironment
from workers.cpu.shell.session import SessionSetup


class ProcessEnvironment(ShellEnvironment):
    """One environment of a `ProcessSandbox`, which tells it how sessions are made."""

    def __init__(
        self,
        spec: EnvironmentSpec,
        files: Files,
        setup: SessionSetup,
        forget: Callable[[str], None],
        memory: MemoryGroup | None,
        leftovers: Leftovers,
    ) -> None:
        super().__init__(spec, files, setup, forget)
        self._folders, self._memory, self._leftovers = files, memory, leftovers

    @property
    def work_folder(self) -> Path:
        """Return the folder in which sessions start."""
        return self._folders.work

    def _remove(self) -> None:
        if self._memory is not None:
            self._memory.remove()
        root = self._folders.root
        # An environment of the same id may be opened as soon as this one is closed.
        gone = root.with_name(f"{root.name}.{secrets.token_hex(4)}.closed")
        with contextlib.suppress(FileNotFoundError):
            os.rename(root, gone)
            self._leftovers.removed(f"the folder of environment {self._spec.id} ({gone.name})", lambda: remove_tree(gone))
