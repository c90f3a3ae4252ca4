"""Whole stacks: Redis, a scheduler and workers as processes of their own, and clients of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from app.journal.database import open_engine, sqlite_url, upgrade
from app.local.stack import StackPlan
from app.replay.outside_api import OutsideApi
from tangram import Client
from tests.live.support import FAST_BEATS, SERVICES, Live, running


@pytest.fixture(scope="session")
def services_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file that declares stub services and quotas."""
    path = tmp_path_factory.mktemp("services") / "services.toml"
    path.write_text(SERVICES)
    return path


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """Return an empty journal."""
    url = sqlite_url(tmp_path / "tangram.sqlite")
    upgrade(url)
    engine = open_engine(url)
    yield engine
    engine.dispose()


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory, services_file: Path) -> Iterator[Live]:
    """Run the stack that most tests share; none of them may harm it."""
    folder = tmp_path_factory.mktemp("live")
    plan = StackPlan(
        nodes=1,
        cores=2,
        memory_mb=4096,
        cells=2,
        cell_memory_mb=1200,
        services_file=services_file,
        variables=FAST_BEATS,
        include=("tests.live.live_tasks",),
    )
    with running(folder, plan) as started:
        yield started


@pytest.fixture
def own_stack(tmp_path: Path, services_file: Path) -> Iterator[Callable[..., Live]]:
    """Return what starts a stack that the test may do anything to."""
    with contextlib.ExitStack() as stacks:

        def start(**plan: Any) -> Live:
            variables = {**FAST_BEATS, **plan.pop("variables", {})}
            whole = StackPlan(**{"nodes": 1, "cores": 2, "memory_mb": 4096, "services_file": services_file, "variables": variables, **plan})
            return stacks.enter_context(running(tmp_path / f"state-{len(list(tmp_path.iterdir()))}", whole))

        yield start


@pytest.fixture
def client(live: Live) -> Iterator[Client]:
    """Return a client of the shared stack."""
    with live.client("tests") as connected:
        yield connected


@pytest.fixture(scope="session")
def outside() -> Iterator[OutsideApi]:
    """Run an outside API."""
    with OutsideApi() as api:
        yield api
