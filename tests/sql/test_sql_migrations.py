"""Migrations build the tables of the models, on both databases, and can be undone."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, inspect, text
from sqlalchemy.exc import IntegrityError

from app.journal import database, migrating
from app.journal.database import (
    MIGRATIONS,
    DatabaseError,
    current_revision,
    latest_revision,
    open_engine,
    require_latest,
    sqlite_url,
    writing,
)
from app.journal.migrating import downgrade, upgrade
from app.journal.models import Action, ActionHour, Base, Environment, EnvironmentHour, Node, ServiceInstance
from app.journal.writing import SqlJournal
from scheduler.model.lifecycle import ACTION, ENVIRONMENT, NODE, SERVICE
from tangram.ends import CAUSES, FAULTS
from tests.sql import make, tables


def test_migrations_build_what_the_models_say(engine: Engine) -> None:
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, Base.metadata) == []


def test_partial_indexes_have_their_conditions(engine: Engine) -> None:
    # alembic does not compare the conditions of indexes, so they are held together here
    found = {}
    for name in Base.metadata.tables:
        for index in inspect(engine).get_indexes(name):
            condition = index.get("dialect_options", {}).get(f"{engine.dialect.name}_where")
            found[index["name"]] = str(condition).strip("()").removesuffix("::text") if condition is not None else None
    said = {}
    for table in Base.metadata.tables.values():
        for declared in table.indexes:
            condition = declared.dialect_options[engine.dialect.name]["where"]
            said[declared.name] = str(condition) if condition is not None else None
    assert found == said


def test_the_latest_revision_is_the_one_that_alembic_would_go_to(engine: Engine) -> None:
    scripts = ScriptDirectory(str(MIGRATIONS))
    assert scripts.get_heads() == [latest_revision()] == [current_revision(engine)]


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.real)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Return a database without tables."""
    if request.param == "sqlite":
        yield sqlite_url(tmp_path / "x.sqlite")
        return
    address = request.getfixturevalue("postgres_url")
    upgrade(address)
    downgrade(address, "base")
    yield address
    upgrade(address)


def test_downgrade_undoes_upgrade(url: str) -> None:
    upgrade(url)
    downgrade(url, "base")
    engine = open_engine(url)
    assert inspect(engine).get_table_names() == ["alembic_version"]
    upgrade(url)
    assert current_revision(engine) == latest_revision()
    engine.dispose()


def test_schedulers_that_start_together_migrate_once(url: str) -> None:
    fork = get_context("fork")
    together = fork.Barrier(2)

    def migrate() -> None:
        together.wait(60)
        upgrade(url)

    both = [fork.Process(target=migrate) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(200)
    assert [process.exitcode for process in both] == [0, 0]
    engine = open_engine(url)
    require_latest(engine)
    engine.dispose()


def test_an_upgrade_waits_for_one_that_takes_longer_than_sqlite_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.01)
    said = threading.Event()
    monkeypatch.setattr(logging.getLogger("app.journal.migrating"), "warning", lambda *_: said.set())
    url = sqlite_url(tmp_path / "x.sqlite")
    upgrade(url, "0020")
    engine = open_engine(url)
    with ThreadPoolExecutor(1) as pool:
        with writing(engine).begin():
            with monkeypatch.context() as limits, pytest.raises(DatabaseError, match="database is locked"):
                limits.setattr(migrating, "LONGEST_UPGRADE_S", 0.0)
                upgrade(url)
            waiting = pool.submit(upgrade, url)
            assert said.wait(60)
            assert not waiting.done()
        waiting.result(60)
    require_latest(engine)
    engine.dispose()


def test_a_failed_migration_leaves_no_half_built_tables(tmp_path: Path) -> None:
    # Given a database in which a later step of the migration cannot succeed
    url = sqlite_url(tmp_path / "x.sqlite")
    engine = open_engine(url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE leases (x INTEGER)"))
    with pytest.raises(DatabaseError, match="leases already exists"):
        upgrade(url)
    assert inspect(engine).get_table_names() == ["leases"]
    engine.dispose()


@pytest.mark.parametrize("is_there", [True, False])
def test_a_database_that_is_not_up_to_date_is_refused(tmp_path: Path, is_there: bool) -> None:
    if is_there:
        (tmp_path / "x.sqlite").touch()
    with pytest.raises(DatabaseError, match="run `tangram db upgrade`"):
        require_latest(open_engine(sqlite_url(tmp_path / "x.sqlite")))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("sqlite:////dev/null/x.sqlite", "unable to open database file"),
        ("mysql://user:secret@host/x", "not mysql"),
        ("not a url", "not a database URL"),
        ("sqlite://host:port/x", "not a database URL"),
        ("postgresql+psycopg://user:secret@127.0.0.1:1/x", "onnection refused"),
    ],
)
def test_a_database_out_of_reach_is_named_in_one_line_without_its_password(url: str, message: str) -> None:
    with pytest.raises(DatabaseError, match=message) as caught:
        upgrade(url)
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.real
@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
def test_a_postgresql_holds_every_text_or_is_refused(postgres_engine: Engine, encoding: str) -> None:
    # Given a database as a server makes it that knows no locale, or an old one
    name = f"{postgres_engine.url.database}_{encoding.lower()}"
    with postgres_engine.connect().execution_options(isolation_level="AUTOCOMMIT") as server:
        server.execute(text(f"CREATE DATABASE {name} ENCODING '{encoding}' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'"))
        url = postgres_engine.url.set(database=name).render_as_string(hide_password=False)
        try:
            if encoding == "LATIN1":
                with pytest.raises(DatabaseError, match="encoding LATIN1 cannot hold every text"):
                    upgrade(url)
                # But a journal that is there goes on
                postgres = open_engine(url)
                with postgres.begin() as connection:
                    connection.execute(text("CREATE TABLE alembic_version (version_num varchar(32))"))
                postgres.dispose()
                upgrade(url)
                return
            upgrade(url)
            engine = open_engine(url)
            with SqlJournal(engine) as journal:
                journal.write([make.received("a", message='"\U0001f40d"')])
                assert [action.message for action in journal.unfinished().actions] == ['"\U0001f40d"']
            engine.dispose()
        finally:
            server.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))


def test_a_path_with_odd_characters_is_a_path(tmp_path: Path) -> None:
    folder = tmp_path / "100% odd?#@ folder"
    folder.mkdir()
    upgrade(sqlite_url(folder / "x.sqlite"))
    assert (folder / "x.sqlite").exists()


def test_a_journal_of_another_release_is_refused_in_one_line(tmp_path: Path) -> None:
    url = sqlite_url(tmp_path / "x.sqlite")
    upgrade(url)
    engine = open_engine(url)
    for found, at_start in (("0015", "run `tangram db upgrade`"), ("9999", "a newer release wrote it, use that one")):
        with writing(engine).begin() as connection:
            connection.execute(text(f"UPDATE alembic_version SET version_num = '{found}'"))
        for bring, advice in ((lambda: upgrade(url), "another version wrote it"), (lambda: require_latest(engine), at_start)):
            with pytest.raises(DatabaseError, match=f"{found}.*{advice}") as caught:
                bring()
            assert "\n" not in str(caught.value)
    engine.dispose()


def test_actions_of_before_have_nothing_in_the_background_and_the_same_act(engine: Engine, write: Any) -> None:
    # Given an action with a wait in the background, as it is after a migration back, and one to the latest revision
    write(make.received(), make.granted(), make.ended(background_s=0.5))
    url = engine.url.render_as_string(hide_password=False)
    downgrade(url, "0016")
    upgrade(url)
    # Then that time is queueing, and the whole is the same
    with engine.connect() as connection:
        row = connection.execute(text("SELECT queue_s, background_s, overhead_s, execution_s, act_s FROM actions")).one()
    assert tuple(row) == (1.5, 0.0, 0.25, 2.0, 3.75)


def test_grants_of_before_are_the_same_in_the_view(engine: Engine, write: Any) -> None:
    # Given actions that wait for their first and second try, run in their first and second, and ended while they ran and while they waited
    ids = ("new", "again", "first", "second", "ended", "cancelled")
    write(*(make.received(id, 100.0 + at) for at, id in enumerate(ids)), *(make.granted(id) for id in ids[1:]))
    write(make.resized("first"), make.ended("ended"), *(make.requeued(id) for id in ("again", "second", "cancelled")))
    write(make.granted("second", 104.0, attempt=2, node="n2"), make.ended("cancelled", status="cancelled", by_worker=False, dop=0))
    before = tables.everything(engine)
    url = engine.url.render_as_string(hide_password=False)
    downgrade(url, "0018")
    # Then they are the rows of one table under the revision before
    names = ", ".join(before["grants"][0])
    with engine.connect() as connection:
        rows = connection.execute(text(f"SELECT {names} FROM grants ORDER BY action, attempt")).all()
    assert [(row.action, row.attempt, row.node, row.units, row.released_at) for row in rows] == [
        (row["action"], row["attempt"], row["node"], row["units"], row["released_at"]) for row in before["grants"]
    ]
    upgrade(url)
    assert tables.everything(engine) == before


STATES: list[tuple[type[Base], str, tuple[str, ...], tuple[str, ...]]] = [
    (Action, "status", ACTION.states, ACTION.ends),
    (Environment, "state", ENVIRONMENT.states, ENVIRONMENT.ends),
    (Node, "state", NODE.states, ()),
    (ServiceInstance, "state", SERVICE.states, ()),
    (ActionHour, "status", ACTION.ends, ()),
    (EnvironmentHour, "state", ENVIRONMENT.ends, ()),
]


def refused(engine: Engine, model: type[Base], **values: object) -> bool:
    """Say whether the database refuses a row with these values, with something in every other column."""
    filled: dict[type, object] = {str: "x", int: 1, float: 1.0, dict: {}, object: {}, bool: False}
    usual = {column.name for column in model.__table__.columns if column.nullable or column.server_default is not None}
    row = {column.name: filled[column.type.python_type] for column in model.__table__.columns if column.name not in usual}
    with engine.connect() as connection:
        try:
            connection.execute(model.__table__.insert().values({**row, **values}))
        except IntegrityError:
            return True
        finally:
            connection.rollback()
    return False


@pytest.mark.parametrize(("model", "column", "states", "ends"), STATES, ids=[one[0].__name__ for one in STATES])
def test_the_database_holds_the_words_of_life_cycles_and_no_others(
    engine: Engine, model: type[Base], column: str, states: tuple[str, ...], ends: tuple[str, ...]
) -> None:
    # alembic does not compare check constraints, so what they refuse is held against the life cycles here
    for state in states:
        ended_at = {"ended_at": 1.0} if state in ends else {}
        assert not refused(engine, model, **{column: state}, **ended_at), state
        if ends:
            assert refused(engine, model, **{column: state}, ended_at=None if state in ends else 1.0), state
    assert refused(engine, model, **{column: "up and away"})


@pytest.mark.parametrize(("column", "words"), [("cause", ("", *CAUSES)), ("fault", FAULTS)], ids=["cause", "fault"])
def test_the_database_holds_the_words_of_ends_and_no_others(engine: Engine, column: str, words: tuple[str, ...]) -> None:
    for word in words:
        assert not refused(engine, Action, status="lost", ended_at=1.0, **{column: word}), word
    assert refused(engine, Action, status="lost", ended_at=1.0, **{column: "somebody"})
