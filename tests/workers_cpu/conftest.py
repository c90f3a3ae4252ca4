"""Fixtures: a sandbox in a temporary folder, and one environment in it, for each kind of shell."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from workers.cpu.process.environment import ProcessEnvironment
from workers.cpu.process.sandbox import ProcessSandbox

from .support import open_one


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[ProcessSandbox]:
    """Give a sandbox with the default shell."""
    box = ProcessSandbox(tmp_path / "box")
    yield box
    box.close()


@pytest.fixture
def env(sandbox: ProcessSandbox) -> ProcessEnvironment:
    """Give an environment with the default shell."""
    return open_one(sandbox)


@pytest.fixture(params=[None, "sh"], ids=["default", "sh"])
def shell_env(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ProcessEnvironment]:
    """Give an environment with the default shell, then one with the system's POSIX shell."""
    box = ProcessSandbox(tmp_path / "box", shell=request.param)
    yield open_one(box)
    box.close()
