"""What the next worker must know of an environment to go on with it, in a file that no command of an environment that is set apart sees.

It is written when the environment is opened. A line is added when a session begins, loses its shell, or is to end: never for a command.
A later line on a session takes the place of an earlier one.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from workers.cpu.abstract import EnvironmentSpec
from workers.cpu.shell.dialect import make_file, remove_file

_CONTROL = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session: the name of its protocol folder, and the folder of the environment in which its next shell begins."""

    control: str
    cwd: str

    def __post_init__(self) -> None:
        """Refuse what is no name of a protocol folder, which is removed with all in it."""
        if not _CONTROL.fullmatch(self.control) or not isinstance(self.cwd, str):
            raise ValueError(f"{self.control!r} and {self.cwd!r} are of no session")


class Record:
    """The record of an environment, of the worker that has it. Any thread may change it.

    `made` is how its sandbox sets environments up, as JSON has it: one that another worker would set up otherwise is not for that worker.
    `own` is what holds for this environment alone.
    """

    def __init__(
        self, path: str, spec: EnvironmentSpec, made: Mapping[str, Any], own: Mapping[str, Any], opened_at: float | None = None
    ) -> None:
        self.path, self.spec, self.made, self.own = path, spec, made, own
        self.opened_at = time.time() if opened_at is None else opened_at
        self._sessions: dict[str, SessionRecord] = {}
        self._lock = threading.Lock()
        self._dropped = False

    @classmethod
    def read(cls, path: str) -> Record:
        """Return what the worker before this one has written. Raises `OSError` or `ValueError`."""
        try:
            said, *changes = map(json.loads, Path(path).read_text().splitlines())
            record = cls(path, EnvironmentSpec(**said["spec"]), said["made"], said["own"], float(said["opened_at"]))
            sessions = {name: session for change in (said, *changes) for name, session in change["sessions"].items()}
            record._sessions = {name: SessionRecord(**session) for name, session in sessions.items() if session is not None}
            return record
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"its record makes no sense: {error}") from error

    @property
    def sessions(self) -> dict[str, SessionRecord]:
        """Its sessions, by name."""
        return dict(self._sessions)

    def write(self) -> None:
        """Write it, before there are sessions. Raises `OSError`."""
        said = {"spec": asdict(self.spec), "made": self.made, "own": self.own, "opened_at": self.opened_at, "sessions": {}}
        make_file(self.path, 0o600, json.dumps(said).encode())

    def note(self, name: str, session: SessionRecord) -> None:
        """Take note of a session as it is now."""
        with self._lock:
            if self._sessions.get(name) != session:
                self._sessions[name] = session
                self._add_or_drop(name, asdict(session))

    def forget(self, name: str) -> None:
        """Take note that a session is to end."""
        with self._lock:
            if self._sessions.pop(name, None) is not None:
                self._add_or_drop(name, None)

    def _add_or_drop(self, name: str, session: dict[str, Any] | None) -> None:
        line = f"\n{json.dumps({'sessions': {name: session}})}".encode()
        try:
            if not self._dropped:
                descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
                try:
                    is_whole = os.write(descriptor, line) == len(line)
                finally:
                    os.close(descriptor)
                if not is_whole:
                    self._drop()
        except OSError:
            # A full disk must not fail a command. An old record would be wrong.
            self._drop()

    def drop(self) -> None:
        """Have nobody go on with the environment."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        self._dropped = True
        remove_file(self.path)
