"""A worker and a scheduler that stand still, as real processes. Kills are in `tests/cli/test_cli_restarts.py`."""

from __future__ import annotations

import sqlite3
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from tangram import Action, ActionLost, Cost, EnvironmentLost
from tests.freezing import freeze
from tests.live.support import Live
from tests.workers_cpu.support import RUN, processes_with

pytestmark = pytest.mark.real


def mark(path: Path, word: str, until: Path | None = None, **fields: object) -> Action:
    """Return an action without an environment that adds a line to a file, and waits for another."""
    arguments = {"path": str(path), "word": word, "until": str(until or "")}
    return Action(kind="live.mark", cost=Cost.of(cores=1), **{"idempotent": True, **fields}).with_arguments(**arguments)  # type: ignore[arg-type]


def words(path: Path) -> Counter[str]:
    return Counter(line.split()[0] for line in path.read_text().splitlines()) if path.exists() else Counter()


def test_a_frozen_worker_is_lost_and_what_it_says_later_does_not_count(harmed: Live, tmp_path: Path) -> None:
    live, path, go = harmed, tmp_path / "marks", tmp_path / "go"
    with live.client() as client:
        env = client.open(trajectory="t")
        command = env.submit(f"sleep 319.484375{RUN}")
        live.until(lambda: processes_with(f"319.484375{RUN}"))
        never = client.submit(mark(path, "never", go, idempotent=False))
        live.until(lambda: words(path))
        worker = live.process("cpu-0")
        freeze(worker.pid)
        try:
            for handle in (command, never):
                with pytest.raises(ActionLost, match="no beat for 15 s"):
                    handle.result(60)
            # And what it did comes to an end before it can learn that it was given up
            go.touch()
        finally:
            worker.resume()
        # Then it comes back, what it still runs is stopped, and the environment is closed
        live.until(lambda: not processes_with(f"319.484375{RUN}"))
        live.until(lambda: live.rows("select state from nodes where name = 'cpu-0'") == [("up",)])
        for use in (lambda: env.exec("echo"), env.close):
            with pytest.raises(EnvironmentLost, match="no beat for 15 s"):
                use()
        # And that it cannot be closed is nobody's fault
        closed = f"select cause, fault from actions where kind = 'cpu.close' and environment = '{env.id}'"
        live.until(lambda: live.rows(closed) == [("environment_lost", "")])
        assert client.open(trajectory="next").exec("echo fine").stdout == "fine\n"
        # And nothing has ended twice
        assert live.rows(f"select status from actions where id in ('{command.id}', '{never.id}')") == [("lost",)] * 2
        with client._session._store as store:
            assert b'"FAILURE"' in (store.get(f"celery-task-meta-{never.id}") or b"")


def test_a_worker_that_stands_still_for_a_while_loses_nothing(harmed: Live, tmp_path: Path) -> None:
    live, path = harmed, tmp_path / "marks"
    with live.client() as client, client.open(trajectory="t") as env:
        command = env.submit("echo first >> file; sleep 1; cat file")
        live.until(lambda: live.rows(f"select status from actions where id = '{command.id}'") == [("running",)])
        worker = live.process("cpu-0")
        # When it is frozen until it is silent, and meanwhile gets another command, and what may run elsewhere
        freeze(worker.pid)
        try:
            live.until(lambda: live.rows("select state from nodes where name = 'cpu-0'") == [("silent",)])
            second, again = env.submit("cat file"), client.submit(mark(path, "again"))
        finally:
            worker.resume()
        # Then nothing is lost, and nothing runs twice
        assert (command.result(60).stdout, second.result(60).stdout, again.result(60)) == ("first\n", "first\n", "again")
    assert words(path) == {"again": 1} and live.rows("select state from nodes where name = 'cpu-0'") == [("up",)]


def suspend_between_transactions(live: Live, scheduler: psutil.Process) -> None:
    """Freeze a scheduler that does not hold the lock of SQLite: nobody else could write as long as it is frozen."""
    path = live.stack.state_dir / "tangram.sqlite"
    for _ in range(1000):
        freeze(scheduler.pid)
        with closing(sqlite3.connect(path, timeout=0.0)) as journal:
            try:
                journal.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError:
                scheduler.resume()
        time.sleep(0.01)
    raise AssertionError("the scheduler holds the lock of its journal all the time")


def test_a_standby_takes_over_from_a_frozen_scheduler(harmed: Live, tmp_path: Path) -> None:
    # Given a scheduler that leads, and one that stands by
    live, path, go = harmed, tmp_path / "marks", tmp_path / "go"
    ((epoch,),) = live.rows("select epoch from leases where name = 'scheduler'")
    spare = live.command("scheduler")
    live.stack.spawn(type(spare)("standby", spare.argv, spare.env))
    with live.client() as client:
        env = client.open(trajectory="t")
        env.exec("echo kept > file")
        running = client.submit(mark(path, "running", go))
        live.until(lambda: words(path))
        # When the first is frozen, so that it holds its connections but lets its lease run out
        first = live.process("scheduler")
        suspend_between_transactions(live, first)
        waiting = env.submit("cat file")
        # Then the other goes on with what runs and what waits
        assert waiting.result(60).stdout == "kept\n"
        # And the first, awake again, does no harm and stands by
        first.resume()
        live.until(lambda: "standing by" in live.log("scheduler"))
        go.touch()
        assert running.result(60) == "running"
        assert env.exec("cat file").stdout == "kept\n"
    assert words(path) == {"running": 1}
    assert live.rows("select epoch from leases where name = 'scheduler'") == [(epoch + 1,)]
    assert live.rows("select distinct state from nodes where name = 'cpu-0'") == [("up",)]
