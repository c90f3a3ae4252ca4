"""Databases for the tests: SQLite always, PostgreSQL for real, and short words for entries."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, make_url, text
from sqlalchemy.exc import OperationalError

from app.journal.database import open_engine, writing
from app.journal.migrating import upgrade
from app.journal.models import Base, Views
from app.journal.writing import SqlJournal
from scheduler.live.entries import (
    ActionEnded,
    ActionGranted,
    ActionReceived,
    ActionRequeued,
    ActionResized,
    Entry,
    EnvironmentChanged,
    InstanceChanged,
    NodeChanged,
)
from scheduler.model.commands import Finish
from tests.journals import new_journal

SERVER_URL = os.environ.get("TANGRAM_TEST_POSTGRES_URL", "postgresql+psycopg://postgres@127.0.0.1:5432")


@pytest.fixture(scope="session")
def postgres_url(real_component: None) -> Iterator[str]:
    """Create an empty database for this test run; without a server skip, in CI fail."""
    name = f"tangram_test_{uuid.uuid4().hex[:12]}"
    url = make_url(SERVER_URL).set(database="postgres")
    server = create_engine(url, isolation_level="AUTOCOMMIT", connect_args={"connect_timeout": 60})
    try:
        with server.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name}"))
            # No test ends the server, so none needs to wait for the disk.
            connection.execute(text(f"ALTER DATABASE {name} SET synchronous_commit TO off"))
    except OperationalError as error:
        message = f"no PostgreSQL at {SERVER_URL}: {str(error.orig).splitlines()[0]}"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    try:
        yield make_url(SERVER_URL).set(database=name).render_as_string(hide_password=False)
    finally:
        with server.connect() as connection:
            connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
        server.dispose()


@pytest.fixture(scope="session")
def postgres_engine(postgres_url: str) -> Iterator[Engine]:
    """Return the PostgreSQL database with the tables in it."""
    upgrade(postgres_url)
    engine = open_engine(postgres_url)
    yield engine
    engine.dispose()


@pytest.fixture(scope="session")
def sqlite_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Return a SQLite database with the tables in it."""
    engine = open_engine(new_journal(tmp_path_factory.mktemp("sqlite") / "tangram.sqlite"))
    yield engine
    engine.dispose()


@pytest.fixture(scope="session", params=["sqlite", pytest.param("postgresql", marks=pytest.mark.real)])
def shared_engine(request: pytest.FixtureRequest) -> Engine:
    """Return either database, as the tests before left it; for tests that empty it themselves."""
    engine = request.getfixturevalue("sqlite_engine" if request.param == "sqlite" else "postgres_engine")
    assert isinstance(engine, Engine)
    return engine


@pytest.fixture
def engine(shared_engine: Engine) -> Engine:
    """Return either database, its tables empty."""
    empty(shared_engine)
    return shared_engine


@pytest.fixture
def write(engine: Engine) -> Iterator[Callable[..., None]]:
    """Return what journals entries as one batch."""
    with SqlJournal(engine) as journal:
        yield lambda *entries: journal.write(entries)


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Engine]:
    """Return a SQLite database of the test's own, for tests that break it or look at its size."""
    engine = open_engine(new_journal(tmp_path / "tangram.sqlite"))
    yield engine
    engine.dispose()


@pytest.fixture
def postgres(postgres_engine: Engine) -> Engine:
    """Return the PostgreSQL database, its tables empty."""
    empty(postgres_engine)
    return postgres_engine


@pytest.fixture(scope="session")
def tables() -> Tables:
    """Return what looks into the tables."""
    return Tables()


@pytest.fixture(scope="session")
def make() -> Make:
    """Return what makes entries."""
    return Make()


def empty(engine: Engine) -> None:
    """Delete all rows of all tables."""
    with writing(engine).begin() as connection:
        for table in Base.metadata.sorted_tables:
            connection.execute(table.delete())


class Tables:
    """Looks into tables past all code under test."""

    def empty(self, engine: Engine) -> None:
        """Delete all rows."""
        empty(engine)

    def rows(self, engine: Engine, name: str) -> list[dict[str, Any]]:
        """Return all rows of the table or view `name`, in order of its key."""
        table = (Base.metadata.tables | Views.metadata.tables)[name]
        with engine.connect() as connection:
            return [dict(row._mapping) for row in connection.execute(table.select().order_by(*table.primary_key.columns))]

    def row(self, engine: Engine, name: str) -> dict[str, Any]:
        """Return the only row of the table `name`."""
        (row,) = self.rows(engine, name)
        return row

    def everything(self, engine: Engine) -> dict[str, list[dict[str, Any]]]:
        """Return all rows of all tables and views."""
        return {name: self.rows(engine, name) for name in (*Base.metadata.tables, *Views.metadata.tables)}


class Make:
    """Entries with sensible values for all that a test does not care about."""

    def received(self, id: str = "a1", at: float = 100.0, *, message: str = '["args"]', **header: Any) -> ActionReceived:
        """Receive an action that was submitted half a second before `at`."""
        words = {"kind": "cpu.exec", "cost": {"cores": [1, 2]}, "job": "coding", "trajectory": "t1", "environment": "e1"}
        return ActionReceived(id=id, header={**words, **header}, message=message, submitted_at=at - 0.5, received_at=at)

    def granted(self, id: str = "a1", at: float = 101.0, *, attempt: int = 1, **changes: Any) -> ActionGranted:
        """Two cores on node n1."""
        values: dict[str, Any] = {"node": "n1", "units": 2, "core_ids": (4, 5), "cell_ids": ()}
        return ActionGranted(id=id, attempt=attempt, granted_at=at, **{**values, **changes})

    def resized(self, id: str = "a1", at: float = 101.5, *, attempt: int = 1, core_ids: tuple[int, ...] = (4,), units: int = 0) -> Entry:
        """To one core of two; without any, to the background, where `units` are those that it had."""
        return ActionResized(id=id, attempt=attempt, core_ids=core_ids, units=len(core_ids) or units, background=not core_ids, at=at)

    def requeued(self, id: str = "a1", at: float = 102.0) -> ActionRequeued:
        """After the loss of its node."""
        return ActionRequeued(id=id, reason="node n1 was lost", at=at)

    def ended(self, id: str = "a1", at: float = 103.0, excerpt: dict[str, Any] | None = None, **changes: Any) -> ActionEnded:
        """Succeeded after 1 s in the queue, 0.25 s of overhead and 2 s of execution."""
        values: dict[str, Any] = {"status": "succeeded", "reason": "", "by_worker": True, "started_at": at - 2.0, "cpu_s": 1.5, "dop": 2}
        parts = {"queue_s": 1.0, "overhead_s": 0.25, "execution_s": 2.0}
        return ActionEnded(end=Finish(id=id, **{**values, **parts, **changes}), at=at, excerpt=excerpt)

    def environment(self, state: str, at: float, *, id: str = "e1", **changes: Any) -> EnvironmentChanged:
        """Of trajectory t1 on node n1."""
        values: dict[str, Any] = {"node": "n1", "job": "coding", "trajectory": "t1", "memory_mb": 512, "pod_cores": 0}
        return EnvironmentChanged(id=id, state=state, at=at, **{**values, **changes})

    def node(self, state: str, at: float, *, name: str = "n1", **description: Any) -> NodeChanged:
        """With eight cores."""
        return NodeChanged(name=name, state=state, description={"cores": 8, "services": {}, **description}, at=at)

    def instance(self, state: str, at: float, *, node: str = "n1", service: str = "judge", **changes: Any) -> InstanceChanged:
        """On cells 0 and 1."""
        return InstanceChanged(node=node, service=service, state=state, at=at, **{"cell_ids": (0, 1), **changes})
