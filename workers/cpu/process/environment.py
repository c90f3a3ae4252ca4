"""An environment of the process sandbox: its folders, its namespaces where it is set apart, and its sessions.

| folder in `<base>/environments/<id>` | what for                                                                    |
|--------------------------------------|-----------------------------------------------------------------------------|
| `work`                               | where sessions start, and HOME                                              |
| `tmp`                                | `/tmp` where it is set apart, else TMPDIR                                   |
| `control`                            | protocol files of sessions, out of the way of commands that walk their home |
| (a file, `record.json`)              | what a successor of the worker must know                                    |
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from workers.cpu.abstract import EnvironmentSpec
from workers.cpu.base import remove_tree
from workers.cpu.files import RegularFiles
from workers.cpu.leftovers import Leftovers
from workers.cpu.process.anchor import Anchor
from workers.cpu.process.groups import MemoryGroup
from workers.cpu.process.isolation import Folders
from workers.cpu.shell.environment import ShellEnvironment
from workers.cpu.shell.session_setup import SessionSetup


class ProcessEnvironment(ShellEnvironment):
    """One environment of a `ProcessSandbox`, which tells it how sessions are made."""

    def __init__(
        self,
        spec: EnvironmentSpec,
        files: RegularFiles,
        setup: SessionSetup,
        forget: Callable[[str], None],
        folders: Folders,
        anchor: Anchor | None,
        memory: MemoryGroup | None,
        leftovers: Leftovers,
    ) -> None:
        super().__init__(spec, files, setup, forget)
        self._folders, self.anchor, self._memory, self._leftovers = folders, anchor, memory, leftovers

    @property
    def work_folder(self) -> Path:
        """Return the folder in which sessions start, on the host."""
        return Path(self._folders.work)

    def _remove(self) -> None:
        if self.anchor is not None:
            self.anchor.end()
        if self._memory is not None:
            self._memory.remove()
        root = self._folders.root
        # An environment of the same id may be opened as soon as this one is closed.
        gone = f"{root}.{secrets.token_hex(4)}.closed"
        with contextlib.suppress(FileNotFoundError):
            os.rename(root, gone)
            self._leftovers.removed(f"the folder of environment {self._spec.id} ({os.path.basename(gone)})", lambda: remove_tree(gone))
