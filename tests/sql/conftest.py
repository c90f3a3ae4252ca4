"""Databases for the tests: SQLite always, PostgreSQL for real."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, make_url, text
from sqlalchemy.exc import OperationalError

from app.journal.database import open_engine
from app.journal.migrating import upgrade
from app.journal.writing import SqlJournal
from tests.journals import new_journal
from tests.needed import needed
from tests.sql import tables

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
        needed(f"no PostgreSQL at {SERVER_URL}: {str(error.orig).splitlines()[0]}")
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
    tables.empty(shared_engine)
    return shared_engine


@pytest.fixture
def journal(engine: Engine) -> Iterator[SqlJournal]:
    """Return the journal of either database."""
    with SqlJournal(engine) as journal:
        yield journal


@pytest.fixture
def write(journal: SqlJournal) -> Callable[..., None]:
    """Return what journals entries as one batch."""
    return lambda *entries: journal.write(entries)


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Engine]:
    """Return a SQLite database of the test's own, for tests that break it or look at its size."""
    engine = open_engine(new_journal(tmp_path / "tangram.sqlite"))
    yield engine
    engine.dispose()


@pytest.fixture
def postgres(postgres_engine: Engine) -> Engine:
    """Return the PostgreSQL database, its tables empty."""
    tables.empty(postgres_engine)
    return postgres_engine
