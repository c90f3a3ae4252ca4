"""A living shell, and a command in it that the worker before this one has left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workers.cpu.shell.backend import Backend, Event


@dataclass(slots=True)
class Shell:
    """A living shell: its process id and its backend."""

    backend: Backend
    pid: int


@dataclass(slots=True)
class LeftRun:
    """A command that the worker before this one has left: it runs, or nobody may have been told of its end.

    `state` is of its memory. `unread` is what its backend has said since. `shell` is None where the backend has ended. `awaits_run` says
    whether the shell was found waiting for a run.
    """

    shell: Shell | None
    state: Mapping[str, Any]
    unread: Sequence[Event]
    awaits_run: bool

    @property
    def action(self) -> str:
        """Return the id of its action."""
        return str(self.state["action"])
