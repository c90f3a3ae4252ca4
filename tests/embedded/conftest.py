"""State folders for stacks, and a look at what they leave behind."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from app.local.processes import Command


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    """Return a state folder that is not there yet."""
    return tmp_path / "state"


@pytest.fixture(scope="session")
def python() -> Callable[..., Command]:
    """Return what makes a command out of lines of Python."""

    def command(name: str, *lines: str, **env: str) -> Command:
        return Command(name, (sys.executable, "-u", "-c", "\n".join(lines)), env)

    return command


@pytest.fixture
def leftovers(state_dir: Path) -> Callable[[], list[str]]:
    """Return what lists processes that name the state folder, or were started by one of its stacks."""

    def find() -> list[str]:
        found = []
        for process in psutil.process_iter():
            try:
                words = " ".join(process.cmdline())
                named = str(state_dir) in words or process.environ().get("TANGRAM_STATE_DIR") == str(state_dir)
            except psutil.Error:
                continue
            if named:
                found.append(words)
        return found

    return find
