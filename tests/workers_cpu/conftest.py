"""Fixtures: a sandbox in a temporary folder, and one environment in it, for each kind of shell.

Sandboxes are set apart from the host where that works. Tests that take an id which a command printed for one of the host's
have a sandbox that is not.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from workers.cpu.errors import SessionUnavailable
from workers.cpu.process import tree
from workers.cpu.process.environment import ProcessEnvironment
from workers.cpu.process.isolation import IsolationChoice
from workers.cpu.process.limits import ProcessLimits
from workers.cpu.process.sandbox import ProcessSandbox

from .support import open_one

TAKES_IDS_FOR_THE_HOSTS = {
    "test_children_are_found_without_the_kernels_children_files",
    "test_a_signal_is_not_sent_to_a_later_process_of_the_same_id",
    "test_an_idle_environment_leaves_no_zombies_behind_its_commands",
    "test_two_hundred_open_environments_are_cheap",
    "test_a_shell_killed_between_two_commands_is_replaced",
    "test_a_killed_supervisor_leaves_nothing_and_is_replaced",
    "test_what_a_killed_supervisor_left_goes_with_the_environment",
}


@pytest.fixture
def sandbox(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ProcessSandbox]:
    """Give a sandbox with the default shell."""
    box = ProcessSandbox(tmp_path / "box", isolation="none" if request.node.name in TAKES_IDS_FOR_THE_HOSTS else "auto")
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


def make(folder: Path, isolation: IsolationChoice, limits: ProcessLimits | None = None) -> ProcessSandbox:
    """Make a sandbox of one kind; skip where bubblewrap does not work, but fail in CI."""
    try:
        return ProcessSandbox(folder, isolation=isolation, limits=limits)
    except SessionUnavailable as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[ProcessSandbox]:
    """Give a sandbox that bubblewrap sets apart."""
    box = make(tmp_path / "box", "bubblewrap")
    yield box
    box.close()


@pytest.fixture
def inside(apart: ProcessSandbox) -> ProcessEnvironment:
    """Give an environment that bubblewrap sets apart."""
    return open_one(apart)


@pytest.fixture(params=["none", "bubblewrap"])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ProcessEnvironment]:
    """Give an environment of each kind."""
    box = make(tmp_path / "box", request.param)
    yield open_one(box)
    box.close()


def below_this() -> list[tree.Process]:
    return tree.descendants(os.getpid())
