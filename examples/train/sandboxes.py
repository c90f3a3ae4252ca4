"""Where the program of a rollout runs: in an environment of the stack, or in a folder of this machine."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Protocol

from tangram import ActionLost, Client, StackUnreachable
from tangram.client import Environment

PROGRAM = Path(__file__).with_name("task.py").read_text(encoding="utf-8")
TIMEOUT_S = 60
ATTEMPTS = 3
PYTHON = ("python3", "-IS", "task.py")
"""The Python of the search path in either sandbox; without `site`, which has nothing for this program, it starts in half of the time."""


class Sandbox(Protocol):
    """The sandbox of one rollout."""

    def run(self, action: str, text: str) -> str | None:
        """Return what the program prints, nothing where it fails; None where there is no answer since the stack failed."""

    def close(self) -> None:
        """End it."""


class StackSandbox:
    """An environment of the stack, and another one where the stack loses it."""

    def __init__(self, client: Client, trajectory: str, operator: str) -> None:
        """Open nothing yet."""
        self._client, self._trajectory, self._program = client, trajectory, f"OPERATOR = {operator!r}\n{PROGRAM}"
        self._environment: Environment | None = None

    def run(self, action: str, text: str) -> str | None:
        """Run the program as one action; it judges after the end of all that the call left running."""
        for _ in range(ATTEMPTS):
            try:
                if self._environment is None:
                    self._environment = self._client.open(trajectory=self._trajectory, memory_mb=64)
                    self._environment.write_file("task.py", self._program.encode())
                command = shlex.join([*PYTHON, action, text])
                done = self._environment.exec(command, timeout_s=TIMEOUT_S, fence=action == "judge")
                return done.stdout if done.exit_code == 0 else ""
            except (ActionLost, StackUnreachable) as error:
                print(f"{self._trajectory}: the stack failed: {error}", file=sys.stderr)
                self._environment = None
        return None

    def close(self) -> None:
        """Close the environment."""
        if self._environment is not None:
            self._environment.close()


class LocalSandbox:
    """A folder and subprocesses of this machine: nothing bounds their number, and nothing keeps them apart."""

    def __init__(self, operator: str) -> None:
        """Make the folder."""
        self._folder = tempfile.TemporaryDirectory()
        Path(self._folder.name, "task.py").write_text(f"OPERATOR = {operator!r}\n{PROGRAM}", encoding="utf-8")

    def run(self, action: str, text: str) -> str:
        """Run the program."""
        command = [*PYTHON, action, text]
        try:
            done = subprocess.run(command, cwd=self._folder.name, capture_output=True, text=True, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return ""
        return done.stdout if done.returncode == 0 else ""

    def close(self) -> None:
        """Remove the folder."""
        self._folder.cleanup()
