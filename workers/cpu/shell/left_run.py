"""A living shell, and a command in it that the worker before this one has left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workers.cpu.shell.backend import Backend, Exited


@dataclass(slots=True)
class Shell:
    """A living shell: its process id and its backend."""

    backend: Backend
    pid: int


@dataclass(slots=True)
class LeftRun:
    """A command that the worker before this one has left: it runs, or nobody may have been told of its end.

    `state` is of its memory. `shell` is None where the backend has ended. `exited` is how the shell has ended, if it has. `awaits_run` says
    whether it was found waiting for a run.
    """

    shell: Shell | None
    state: Mapping[str, Any]
    exited: Exited | None
    awaits_run: bool

    @property
    def action(self) -> str:
        """Return the id of its action."""
        return str(self.state["action"])
