"""The journal when things break: full disk, lost connection, killed process, another scheduler."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
from sqlalchemy import Connection, Engine, event, text

from app.gateway.errors import NotFound
from app.gateway.journal import Journal
from app.journal import writing
from app.journal.database import open_engine
from app.journal.leader import Lease
from app.journal.unfinished import Unfinished
from app.journal.writing import JournalError, LeaseLost, SqlJournal
from app.local.processes import wait_until
from tangram.clock import Clock, installed
from tests.sql import make, tables

ROOT = Path(__file__).resolve().parents[2]

WRITER = """
import sys
from app.journal.database import open_engine
from app.journal.writing import SqlJournal
from scheduler.live.entries import ActionGranted, ActionReceived
journal = SqlJournal(open_engine(sys.argv[1]))
for batch in range(1_000_000):
    entries = []
    for number in range(20):
        id = f"{batch}-{number}"
        entries.append(ActionReceived(id=id, header={"kind": "cpu.exec"}, message="m" * 500, submitted_at=1.0, received_at=2.0))
        entries.append(ActionGranted(id=id, attempt=1, node="n", units=1, core_ids=(0,), cell_ids=(), granted_at=3.0))
    journal.write(entries)
    print(batch, flush=True)
"""


def nobody_writes(engine: Engine) -> bool:
    """Say whether no other connection is in a transaction: a server may still carry out what a killed client has sent."""
    if engine.dialect.name == "sqlite":
        return True
    clients = "backend_type = 'client backend' AND datname = current_database() AND pid <> pg_backend_pid()"
    with engine.connect() as connection:
        return connection.execute(text(f"SELECT count(*) FROM pg_stat_activity WHERE {clients} AND state <> 'idle'")).scalar_one() == 0


def test_a_killed_writer_leaves_whole_batches(engine: Engine) -> None:
    # Given a process that journals batches of 20 actions, each received and granted
    url = engine.url.render_as_string(hide_password=False)
    writer = subprocess.Popen([sys.executable, "-c", WRITER, url], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    for _ in range(10):
        acknowledged = int(writer.stdout.readline())
    writer.send_signal(signal.SIGKILL)
    rest = writer.stdout.read().split()
    writer.wait(60)
    assert wait_until(lambda: nobody_writes(engine), 60)
    # Then each batch is there as a whole or not at all, and all of those that were acknowledged
    acknowledged = max([acknowledged, *(int(number) for number in rest if number.isdigit())])
    actions, grants = tables.rows(engine, "actions"), tables.rows(engine, "grants")
    batches = {action["id"].split("-")[0] for action in actions}
    assert batches >= {str(batch) for batch in range(acknowledged + 1)}
    assert len(actions) == 20 * len(batches) == len(grants)
    assert {action["status"] for action in actions} == {"running"}
    if engine.dialect.name == "sqlite":
        with engine.connect() as connection:
            assert connection.execute(text("PRAGMA integrity_check")).scalar_one() == "ok"
    with SqlJournal(engine) as journal:
        assert len(journal.unfinished().actions) == len(actions)


def test_a_full_disk_is_one_clear_line_and_none_of_the_batch(own: Engine) -> None:
    def cap(connection: sqlite3.Connection, _: object) -> None:
        connection.execute("PRAGMA max_page_count=1")

    with SqlJournal(own) as journal:
        journal.write([make.received("first")])
        # Given a database that cannot grow
        journal.close()
        own.dispose()
        event.listen(own, "connect", cap)
        with pytest.raises(JournalError, match="database or disk is full") as caught:
            journal.write([make.received(f"a{number}", message="m" * 10_000) for number in range(20)])
        assert "\n" not in str(caught.value) and str(own.url.database) in str(caught.value)
        assert [row["id"] for row in tables.rows(own, "actions")] == ["first"]
        event.remove(own, "connect", cap)
        own.dispose()
        journal.write([make.received("second")])
        assert len(tables.rows(own, "actions")) == 2


def test_readers_do_not_hold_up_the_journal(own: Engine) -> None:
    with own.connect() as reader, SqlJournal(own) as journal:
        assert reader.execute(text("SELECT count(*) FROM actions")).scalar_one() == 0
        # When the journal writes, it does not wait
        journal.write([make.received()])
        assert reader.execute(text("SELECT count(*) FROM actions")).scalar_one() == 0
    assert len(tables.rows(own, "actions")) == 1


def test_a_broken_connection_is_made_anew(postgres: Engine) -> None:
    others = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    with SqlJournal(postgres) as journal:
        journal.write([make.received()])
        with postgres.connect() as connection:
            assert connection.execute(text(others)).all() != []
        journal.write([make.granted()])
        journal.write([make.ended()])
    assert tables.row(postgres, "actions")["status"] == "succeeded"
    assert len(tables.rows(postgres, "grants")) == 1


def test_a_server_that_only_reads_any_more_is_left(postgres: Engine) -> None:
    engine = open_engine(postgres.url.render_as_string(hide_password=False))
    with SqlJournal(engine) as journal:
        # Given connections that a standby answers
        with engine.connect() as first, engine.connect() as second:
            for connection in (first, second):
                connection.execute(text("SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY"))
                connection.commit()
        # Then one journal and one lease find the server that writes
        journal.write([make.received("a")])
        assert Lease(engine, "x", "me", 60.0).acquire(1.0) == 1
    engine.dispose()
    assert [row["id"] for row in tables.rows(postgres, "actions")] == ["a"]


def test_a_server_that_stays_away_is_one_clear_line_after_the_given_time() -> None:
    journal = SqlJournal(open_engine("postgresql+psycopg://user:secret@127.0.0.1:1/x"), retry_s=0.3)
    began = time.monotonic()
    with pytest.raises(JournalError, match="onnection refused") as caught:
        journal.write([make.received()])
    assert 0.2 < time.monotonic() - began < 15.0
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_what_the_database_refuses_is_not_tried_again(postgres: Engine) -> None:
    with SqlJournal(postgres, retry_s=200.0) as journal:
        began = time.monotonic()
        with pytest.raises(JournalError, match="out of range"):
            journal.write([make.received(), make.granted(units=2**40)])
        assert time.monotonic() - began < 150.0
    assert tables.rows(postgres, "actions") == []


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_a_name_that_no_database_can_hold_is_unknown_and_no_outage(engine: Engine, name: str) -> None:
    with suppress(NotFound):
        assert asyncio.run(Journal(engine).action(name)) is None


def clock(**times: Callable[[], float]) -> Clock:
    """Return the system's clock, but for one of its times, or both."""
    made = Clock()
    for name, look in times.items():
        setattr(made, name, look)
    return made


@pytest.mark.parametrize("ahead", ["time", "monotonic"])
def test_a_lease_is_looked_at_only_where_it_may_have_been_taken(engine: Engine, ahead: str) -> None:
    sent: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *call: sent.append(call[2]))
    old = Lease(engine, "scheduler", "old", 10.0)
    old.acquire(time.time())
    with SqlJournal(engine, lease=old) as journal:
        journal.write([make.received("first")])
        sent.clear()
        # Then a write does not ask for it
        journal.write([make.received("second")])
        assert sent and not any("leases" in statement for statement in sent)
        # And one of a scheduler that has stood still for half of its lease does, by whichever clock that shows
        Lease(engine, "scheduler", "standby", 10.0).acquire(time.time() + 60.0)
        later = clock(**{ahead: lambda: getattr(time, ahead)() + 5.0})
        with installed(later), pytest.raises(LeaseLost, match="another scheduler"):
            journal.write([make.received("late")])
    assert {row["id"] for row in tables.rows(engine, "actions")} == {"first", "second"}


@pytest.fixture
def limited(postgres: Engine) -> Iterator[Engine]:
    """Return PostgreSQL over connections of a scheduler's own, whose transactions may not stand still for long."""
    engine = open_engine(postgres.url.render_as_string(hide_password=False))
    yield engine
    engine.dispose()


def test_a_scheduler_that_stands_still_before_its_commit_has_not_written(postgres: Engine, limited: Engine) -> None:
    # Given a scheduler that stands still when it has looked at its lease and is about to commit
    old = Lease(postgres, "scheduler", "old", 2.0)
    old.acquire(time.time())
    stood_still: list[int] = []

    def stand_still(connection: Connection) -> None:
        stood_still.append(connection.connection.dbapi_connection.info.backend_pid)  # type: ignore[union-attr]
        wait_until(lambda: not is_connected(postgres, stood_still[0]), 30.0)
        # When its standby takes over meanwhile
        Lease(postgres, "scheduler", "standby", 10.0).acquire(time.time() + 60.0)

    with SqlJournal(limited, lease=old) as journal:
        journal.write([make.received("before")])
        event.listen(limited, "commit", stand_still, once=True)
        with pytest.raises(LeaseLost):
            journal.write([make.received("late")])
    assert stood_still and [row["id"] for row in tables.rows(postgres, "actions")] == ["before"]


def test_reading_at_the_start_may_take_longer_than_a_transaction_may_stand_still(
    postgres: Engine, limited: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a scheduler whose lease lets transactions stand still for 400 ms, and a journal in which much is unfinished
    lease = Lease(postgres, "scheduler", "slow", 1.0)
    lease.acquire(time.time())
    load = writing.load_unfinished

    def load_slowly(connection: Connection, shard: int, between: Callable[[], None]) -> Unfinished:
        load(connection)
        time.sleep(0.5)
        return load(connection, shard, between)

    monkeypatch.setattr(writing, "load_unfinished", load_slowly)
    with SqlJournal(limited, lease=lease, retry_s=0.0) as journal:
        assert journal.unfinished().actions == []


def test_nobody_takes_the_lease_of_a_scheduler_that_reads_for_longer_than_it_lasts(postgres: Engine) -> None:
    with SqlJournal(postgres) as journal:
        journal.write([make.received(f"a{number}") for number in range(10)])
    # Given a clock that goes on by 4 s between two looks at it
    look = count(1000.0, 4.0).__next__
    with installed(clock(time=look, monotonic=look)):
        lease = Lease(postgres, "scheduler", "slow", 20.0)
        lease.acquire(look())
        ends_at = tables.row(postgres, "leases")["expires_at"]
        with SqlJournal(postgres, lease=lease) as journal:
            assert len(journal.unfinished().actions) == 10 and look() > ends_at
    assert Lease(postgres, "scheduler", "standby", 20.0).acquire(look()) is None


def is_connected(engine: Engine, pid: int) -> bool:
    """Say whether PostgreSQL serves a connection by the process `pid`."""
    with engine.connect() as connection:
        return connection.execute(text(f"SELECT 1 FROM pg_stat_activity WHERE pid = {pid}")).first() is not None


def test_without_its_lease_a_scheduler_writes_nothing(engine: Engine) -> None:
    lease = Lease(engine, "scheduler", "a", 10.0)
    with SqlJournal(engine, lease=lease) as journal, pytest.raises(LeaseLost):
        journal.write([make.received()])
    assert tables.rows(engine, "actions") == []
