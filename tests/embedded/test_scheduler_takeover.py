"""A scheduler that stands by, when its turn comes, and what it does beside scheduling once it leads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from app import scheduler_process
from app.journal import retention
from app.journal.database import open_engine
from app.journal.leader import SCHEDULER_LEASE, Lease
from app.journal.writing import SqlJournal
from app.local.processes import wait_until
from scheduler.live.entries import ActionEnded, ActionReceived
from scheduler.model.commands import Finish
from tangram.settings import Settings
from tangram.wire import SCHEDULER_KEY, SHARDS_KEY, of_shard
from tests.conftest import RedisServer, RedisUrls
from tests.journals import new_journal


@contextmanager
def scheduling(settings: Settings) -> Iterator[None]:
    """Run a scheduler in a thread."""
    stop = threading.Event()
    scheduler = threading.Thread(target=scheduler_process.run, args=(settings, stop), daemon=True)
    scheduler.start()
    yield
    stop.set()
    scheduler.join(30)
    assert not scheduler.is_alive()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """Return the database of an empty journal."""
    engine = open_engine(new_journal(tmp_path / "tangram.sqlite"))
    yield engine
    engine.dispose()


def value(engine: Engine, query: str) -> Any:
    """Return the one value that a query asks for."""
    with engine.connect() as connection:
        return connection.exec_driver_sql(query).scalar_one()


def test_a_scheduler_whose_turn_comes_while_the_broker_is_away_waits_for_it(own_redis: RedisServer, engine: Engine) -> None:
    def shown() -> bool:
        with own_redis.client() as client:
            return client.exists(SCHEDULER_KEY) == 1

    def leads_at_last() -> tuple[int, str]:
        of_lease = "from leases where name = 'scheduler'"
        return value(engine, f"select coalesce(max(epoch), 0) {of_lease}"), value(engine, f"select coalesce(max(holder), '') {of_lease}")

    # Given a scheduler whose lease another one has taken
    urls = {"broker_url": own_redis.broker, "result_url": own_redis.result, "database_url": str(engine.url)}
    with scheduling(Settings(**urls, connect_timeout_s=3.0, takeover_s=0.5, services_file=None)):
        assert wait_until(lambda: leads_at_last()[0] == 1 and shown(), 60)
        other = Lease(engine, SCHEDULER_LEASE, "other", 3600.0)
        assert other.acquire(time.time() + 3600.0) == 2
        # When that one is gone, and the broker with it
        own_redis.stop()
        other.release()
        # Then the scheduler tries, and leaves the lease to others, who may reach the broker
        assert wait_until(lambda: leads_at_last() == (3, ""), 60)
        # And leads when the broker is back
        own_redis.start()
        assert wait_until(shown, 60)


def test_a_scheduler_that_counts_other_shards_does_not_lead_while_those_of_the_first_number_live(
    redis_urls: RedisServer, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    urls = {"broker_url": redis_urls.broker, "result_url": redis_urls.result, "database_url": str(engine.url)}
    same = Settings(**urls, takeover_s=1.0, services_file=None)

    def of(shard: int, shards: int) -> Settings:
        return same.model_copy(update={"shard": shard, "shards": shards})

    def leads(shard: int) -> bool:
        query = f"select count(*) from leases where name = '{of_shard(SCHEDULER_LEASE, shard)}' and holder <> ''"
        return bool(value(engine, query))

    with redis_urls.client() as store, ExitStack() as first:
        # Given a scheduler of one of three shards, and one of the first of two
        first.enter_context(scheduling(of(2, 3)))
        assert wait_until(lambda: leads(2) and store.get(SHARDS_KEY) == b"3", 60)
        with scheduling(of(0, 2)):
            # Then the second one says why it does not lead, once, and goes on with asking
            line = "cannot lead: TANGRAM_SHARDS is 2 here, and 3 for the schedulers that run"
            assert wait_until(lambda: line in caplog.messages or leads(0), 60)
            looked_at = value(engine, "select expires_at from leases where name = 'shards'")
            assert wait_until(lambda: value(engine, "select expires_at from leases where name = 'shards'") > looked_at + 1.0, 60)
            assert (caplog.messages.count(line), leads(0), store.get(SHARDS_KEY)) == (1, False, b"3")
            # When the first one is gone, then it leads
            first.close()
            assert wait_until(lambda: leads(0) and store.get(SHARDS_KEY) == b"2", 60)


def test_a_scheduler_that_finds_others_of_another_number_as_it_begins_to_lead_shows_itself_to_nobody(
    redis_urls: RedisServer, engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = {"broker_url": redis_urls.broker, "result_url": redis_urls.result, "database_url": str(engine.url)}
    settings = Settings(**urls, takeover_s=3.0, services_file=None, shards=2)
    transport_of = scheduler_process.transport_of

    def late(*given: Any) -> Any:
        # Given that others took over the number of shards while it stood still, until it is to look at its leases again
        with engine.begin() as connection:
            connection.exec_driver_sql("update leases set holder = '3', expires_at = expires_at + 3600 where name = 'shards'")
        looks_again = time.time() + settings.takeover_s / 5
        assert wait_until(lambda: time.time() > looks_again, 60)
        return transport_of(*given)

    monkeypatch.setattr(scheduler_process, "transport_of", late)
    with redis_urls.client() as store, scheduling(settings):
        # Then it stands by
        assert wait_until(lambda: "cannot lead: TANGRAM_SHARDS is 2 here, and 3 for the schedulers that run" in caplog.messages, 60)
        # And it has neither told clients its number, nor does it keep its shard from others
        assert store.get(SHARDS_KEY) is None
        assert value(engine, "select holder from leases where name = 'scheduler'") == ""


def test_a_scheduler_that_leads_removes_what_is_too_old(redis_urls: RedisUrls, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "FIRST_LOOK_S", 0.0)
    long_ago = time.time() - 2 * 86_400.0
    with SqlJournal(engine) as journal:
        received = ActionReceived(id="a", header={"kind": "my.task"}, message="", submitted_at=long_ago, received_at=long_ago)
        parts = {"queue_s": 0.0, "overhead_s": 0.0, "execution_s": 1.0, "cpu_s": 0.0}
        end = Finish(id="a", status="failed", reason="", by_worker=True, started_at=None, dop=1, **parts)
        journal.write([received, ActionEnded(end=end, at=long_ago)])
    urls = {"broker_url": redis_urls.broker, "result_url": redis_urls.result, "database_url": str(engine.url)}
    with scheduling(Settings(**urls, keep_days=1, services_file=None)):
        # Then its row goes, and it is still counted
        assert wait_until(lambda: value(engine, "select count(*) from actions") == 0, 60)
        assert value(engine, "select sum(actions) from action_hours") == 1
