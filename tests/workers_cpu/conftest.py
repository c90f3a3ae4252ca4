"""Fixtures: a sandbox of the test's own, and environments of its own in sandboxes that the tests share, for each kind of shell.

Sandboxes are set apart from the host where that works. Tests that take an id which a command printed for one of the host's
have a sandbox that is not.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from workers.cpu.abstract import EnvironmentSpec
from workers.cpu.errors import SessionUnavailable
from workers.cpu.process import tree
from workers.cpu.process.environment import ProcessEnvironment
from workers.cpu.process.isolation import IsolationChoice
from workers.cpu.process.limits import ProcessLimits
from workers.cpu.process.sandbox import ProcessSandbox

TAKES_IDS_FOR_THE_HOSTS = {
    "test_children_are_found_without_the_kernels_children_files",
    "test_a_signal_is_not_sent_to_a_later_process_of_the_same_id",
    "test_an_idle_environment_leaves_no_zombies_behind_its_commands",
    "test_a_killed_supervisor_leaves_nothing_and_is_replaced",
    "test_what_a_killed_supervisor_left_goes_with_the_environment",
}


Shared = Callable[[IsolationChoice, str | None], ProcessSandbox]
numbers = count()


def isolation_for(request: pytest.FixtureRequest) -> IsolationChoice:
    """Return the isolation of a test's sandbox."""
    return "none" if request.node.name in TAKES_IDS_FOR_THE_HOSTS else "auto"


@pytest.fixture(scope="package")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    """Return what gives the sandbox of an isolation and a shell that tests share; none of them may harm it."""
    boxes: dict[tuple[IsolationChoice, str | None], ProcessSandbox] = {}

    def find(isolation: IsolationChoice, shell: str | None) -> ProcessSandbox:
        if (isolation, shell) not in boxes:
            boxes[isolation, shell] = make(tmp_path_factory.mktemp("shared") / "box", isolation, shell=shell)
        return boxes[isolation, shell]

    yield find
    for box in boxes.values():
        box.close()


def environment_in(box: ProcessSandbox) -> Iterator[ProcessEnvironment]:
    """Give an environment for one test."""
    environment = box.open(EnvironmentSpec(id=f"e{next(numbers)}"))
    yield environment
    environment.close()


@pytest.fixture
def sandbox(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ProcessSandbox]:
    """Give a sandbox with the default shell."""
    box = ProcessSandbox(tmp_path / "box", isolation=isolation_for(request))
    yield box
    box.close()


@pytest.fixture
def env(shared: Shared, request: pytest.FixtureRequest) -> Iterator[ProcessEnvironment]:
    """Give an environment with the default shell."""
    yield from environment_in(shared(isolation_for(request), None))


@pytest.fixture(params=[None, "sh"], ids=["default", "sh"])
def shell_env(request: pytest.FixtureRequest, shared: Shared) -> Iterator[ProcessEnvironment]:
    """Give an environment with the default shell, then one with the system's POSIX shell."""
    yield from environment_in(shared("auto", request.param))


def make(folder: Path, isolation: IsolationChoice, limits: ProcessLimits | None = None, **more: Any) -> ProcessSandbox:
    """Make a sandbox of one kind; skip where bubblewrap does not work, but fail in CI."""
    try:
        return ProcessSandbox(folder, isolation=isolation, limits=limits, **more)
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
def inside(shared: Shared) -> Iterator[ProcessEnvironment]:
    """Give an environment that bubblewrap sets apart."""
    yield from environment_in(shared("bubblewrap", None))


@pytest.fixture(params=["none", "bubblewrap"])
def either(request: pytest.FixtureRequest, shared: Shared) -> Iterator[ProcessEnvironment]:
    """Give an environment of each kind."""
    yield from environment_in(shared(request.param, None))


def below_this() -> list[tree.Process]:
    return tree.descendants(os.getpid())
