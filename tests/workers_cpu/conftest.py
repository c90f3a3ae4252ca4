"""Fixtures: a process sandbox of the test's own, and environments of its own in sandboxes that the tests share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.needed import needed
from workers.cpu.abstract import EnvironmentSpec
from workers.cpu.errors import SessionUnavailable
from workers.cpu.process import sandbox as sandbox_module
from workers.cpu.process import tree
from workers.cpu.process.environment import ProcessEnvironment
from workers.cpu.process.isolation import IsolationChoice, View
from workers.cpu.process.limits import ProcessLimits
from workers.cpu.process.sandbox import ProcessSandbox

Shared = Callable[[IsolationChoice], ProcessSandbox]
numbers = count()

EITHER = ["none", pytest.param("bubblewrap", marks=pytest.mark.real)]
"""Each isolation by a program of its own. What is the same for both is shown again with bubblewrap by `make test-real`."""


@pytest.fixture(scope="package")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    """Return what gives the sandbox of an isolation that tests share; none of them may harm it."""
    with ExitStack() as stack:
        yield cache(lambda isolation: stack.enter_context(closing(make(tmp_path_factory.mktemp("shared") / "box", isolation))))


def environment_in(box: ProcessSandbox) -> Iterator[ProcessEnvironment]:
    environment = box.open(EnvironmentSpec(id=f"e{next(numbers)}"))
    yield environment
    environment.close()


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[ProcessSandbox]:
    with closing(ProcessSandbox(tmp_path / "box")) as box:
        yield box


@pytest.fixture
def env(shared: Shared) -> Iterator[ProcessEnvironment]:
    """Give an environment that is set apart where that works."""
    yield from environment_in(shared("auto"))


@pytest.fixture
def host_env(shared: Shared) -> Iterator[ProcessEnvironment]:
    """Give an environment that is not set apart: ids that its commands print are the host's."""
    yield from environment_in(shared("none"))


def make(folder: Path, isolation: IsolationChoice, limits: ProcessLimits | None = None, **more: Any) -> ProcessSandbox:
    """Make a sandbox of one kind; skip where bubblewrap does not work, but fail in CI."""
    try:
        return ProcessSandbox(folder, isolation=isolation, limits=limits, **more)
    except SessionUnavailable as error:
        needed(str(error))
        raise


def none_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have environments see what cannot be mounted, so that neither bubblewrap nor a view works."""
    monkeypatch.setattr(sandbox_module, "view_for", lambda *_: View(base=Path("/no/such"), shown=()))


@pytest.fixture
def inside(shared: Shared) -> Iterator[ProcessEnvironment]:
    yield from environment_in(shared("bubblewrap"))


@pytest.fixture(params=EITHER)
def either(request: pytest.FixtureRequest, shared: Shared) -> Iterator[ProcessEnvironment]:
    yield from environment_in(shared(request.param))


def below_this() -> list[tree.Process]:
    return tree.descendants(os.getpid())
