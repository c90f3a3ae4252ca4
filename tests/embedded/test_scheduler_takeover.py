"""A scheduler that stands by, when its turn comes, and what it does beside scheduling once it leads."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from app import scheduler_process
from app.journal import retention
from app.journal.database import open_engine
from app.journal.leader import SCHEDULER_LEASE, Lease
from app.journal.writing import SqlJournal
from app.local.processes import wait_until
from scheduler.live.entries import ActionEnded, ActionReceived
from scheduler.model.commands import Finish
from tangram.settings import Settings
from tangram.wire import SCHEDULER_KEY
from tests.conftest import RedisServer, RedisUrls
from tests.journals import new_journal


def test_a_scheduler_whose_turn_comes_while_the_broker_is_away_waits_for_it(own_redis: RedisServer, tmp_path: Path) -> None:
    url = new_journal(tmp_path / "tangram.sqlite")
    engine, stop = open_engine(url), threading.Event()

    def epoch() -> int:
        with engine.connect() as connection:
            return int(connection.exec_driver_sql("select coalesce(max(epoch), 0) from leases").scalar_one())

    def holder() -> str:
        with engine.connect() as connection:
            return str(connection.exec_driver_sql("select holder from leases").scalar_one())

    def shown() -> bool:
        with own_redis.client() as client:
            return client.exists(SCHEDULER_KEY) == 1

    # Given a scheduler whose lease another one has taken
    settings = Settings(
        broker_url=own_redis.broker,
        result_url=own_redis.result,
        database_url=url,
        connect_timeout_s=3.0,
        takeover_s=0.5,
        services_file=None,
    )
    scheduler = threading.Thread(target=scheduler_process.run, args=(settings, stop), daemon=True)
    scheduler.start()
    assert wait_until(lambda: epoch() == 1 and shown(), 60)
    other = Lease(engine, SCHEDULER_LEASE, "other", 3600.0)
    assert other.acquire(time.time() + 3600.0) == 2
    # When that one is gone, and the broker with it
    own_redis.stop()
    other.release()
    # Then the scheduler tries, and leaves the lease to others, who may reach the broker
    assert wait_until(lambda: epoch() == 3 and holder() == "", 60)
    # And leads when the broker is back
    own_redis.start()
    assert wait_until(shown, 60)
    stop.set()
    scheduler.join(30)
    assert not scheduler.is_alive()
    engine.dispose()


def test_a_scheduler_that_leads_removes_what_is_too_old(redis_urls: RedisUrls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "FIRST_LOOK_S", 0.0)
    url = new_journal(tmp_path / "tangram.sqlite")
    engine, stop = open_engine(url), threading.Event()
    long_ago = time.time() - 2 * 86_400.0
    with SqlJournal(engine) as journal:
        received = ActionReceived(id="a", header={"kind": "my.task"}, message="", submitted_at=long_ago, received_at=long_ago)
        parts = {"queue_s": 0.0, "overhead_s": 0.0, "execution_s": 1.0, "cpu_s": 0.0}
        end = Finish(id="a", status="failed", reason="", by_worker=True, started_at=None, dop=1, **parts)
        journal.write([received, ActionEnded(end=end, at=long_ago)])
    settings = Settings(broker_url=redis_urls.broker, result_url=redis_urls.result, database_url=url, keep_days=1, services_file=None)
    scheduler = threading.Thread(target=scheduler_process.run, args=(settings, stop), daemon=True)
    scheduler.start()

    def count(query: str) -> int:
        with engine.connect() as connection:
            return int(connection.exec_driver_sql(query).scalar_one())

    # Then its row goes, and it is still counted
    assert wait_until(lambda: count("select count(*) from actions") == 0, 60)
    assert count("select sum(actions) from action_hours") == 1
    stop.set()
    scheduler.join(30)
    assert not scheduler.is_alive()
    engine.dispose()
