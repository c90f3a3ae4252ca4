"""Retention: what ended long ago is rolled up and removed, and totals stay what they were."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from sqlalchemy import Engine, event

from app.journal import retention
from app.journal.database import size_mb
from app.journal.figures import Selection, act_report, observations
from app.journal.leader import Lease
from app.journal.retention import DAY_S, Pruning, Retention
from app.journal.rollup import BINS_PER_OCTAVE, bin_of, seconds_of
from app.journal.runs import finish_run, load_run, start_run
from app.journal.status import status
from app.journal.writing import LeaseLost, SqlJournal
from app.local.processes import wait_until
from scheduler.live.entries import Entry, MessageFailed
from tangram.settings import Settings
from tests.sql import make, tables

NOW = 100 * DAY_S
OLD, RECENT = NOW - 50 * DAY_S, NOW - 5 * DAY_S


def pruned(engine: Engine, history: int = 0, now: float = NOW) -> int:
    return Retention(engine, keep_days=30, history=history).prune(now)


def life(
    id: str, ended_at: float, *, cores: int = 2, job: str = "coding", kind: str = "cpu.exec", environment: str = "e1", **end: Any
) -> list[Entry]:
    """Return the whole life of an action that ends at a time."""
    received = make.received(id, ended_at - 3.25, job=job, kind=kind, environment=environment)
    return [received, make.granted(id, ended_at - 2.0, units=cores), make.ended(id, ended_at, **{"unit_s": 4.0, **end})]


@pytest.fixture
def live(write: Any) -> Callable[..., None]:
    """Return what journals the whole life of an action."""
    return lambda id, ended_at, **more: write(*life(id, ended_at, **more))


def test_what_ended_long_ago_goes_with_its_grants_and_the_rest_stays(engine: Engine, live: Any, write: Any) -> None:
    # Given old and recent actions and environments, and some of long ago that have not ended
    live("old", OLD)
    live("recent", RECENT)
    live("unanswered", OLD, status="lost", by_worker=False)
    write(make.received("waits", OLD), make.received("runs", OLD), make.granted("runs", OLD))
    for id, states, at in (("e-old", ("open", "closed"), OLD), ("e-recent", ("open", "closed"), RECENT), ("e-open", ("open",), OLD)):
        write(*[make.environment(state, at, id=id) for state in states])
    # And nodes and failures of both times
    write(make.node("lost", OLD, name="gone"), make.instance("host", OLD, node="gone"), make.node("up", OLD, name="up"))
    for message, at in (("m-old", OLD), ("m-recent", RECENT)):
        write(MessageFailed(message=message, kind="action", action=None, epoch=1, traceback="", at=at))
    assert pruned(engine) == 3
    kept = {
        name: [next(iter(row.values())) for row in tables.rows(engine, name)]
        for name in ("actions", "grants", "messages", "environments", "nodes", "service_instances", "failed_messages")
    }
    assert kept == {
        "actions": ["recent", "runs", "waits"],
        "grants": ["recent", "runs"],
        "messages": ["runs", "waits"],
        "environments": ["e-open", "e-recent"],
        "nodes": ["up"],
        "service_instances": [],
        "failed_messages": ["m-recent"],
    }


def test_successes_go_before_all_else_that_ended(engine: Engine, live: Any) -> None:
    # Given successes and failures of five days ago and of lately, one of them a success that is learned from
    for at, when in ((RECENT, "recent"), (NOW - 60.0, "now")):
        live(f"good-{when}", at)
        live(f"bad-{when}", at, status="failed", cause="exit")
    succeeded = Retention(engine, keep_days=30, keep_succeeded_days=3, history=0)
    assert succeeded.prune(NOW) == 1
    # Then failures stay until their own time, and totals count all
    assert [row["id"] for row in tables.rows(engine, "actions")] == ["bad-now", "bad-recent", "good-now"]
    assert act_report(engine).total.by_status == {"failed": 2, "succeeded": 2}
    # And the next look goes on from there
    assert succeeded.prune(NOW + 3 * DAY_S) == 1
    assert [row["id"] for row in tables.rows(engine, "actions")] == ["bad-now", "bad-recent"]


def test_a_journal_above_its_size_gives_up_its_oldest_successes(own: Engine) -> None:
    with SqlJournal(own) as journal:
        for number in range(300):
            end = {} if number % 10 else {"status": "failed", "cause": "exit"}
            journal.write(life(f"a{number:03}", NOW - DAY_S + number, **end))
    before = _size_mb(own)
    # When the journal is a little larger than it may be
    Retention(own, keep_days=30, history=0, most_mb=before - 0.02).prune(NOW)
    left = tables.rows(own, "actions")
    assert (len(left), sum(row["status"] == "failed" for row in left)) == (100, 30)
    assert min(row["id"] for row in left if row["status"] == "succeeded") == "a223"
    assert _size_mb(own) < before


def test_a_journal_loses_no_more_than_it_has_to(own: Engine) -> None:
    # Given 600 successes, half of them too old, as many as make the journal too large; and later ones, the last of them of this hour
    ends = [NOW - 5 * DAY_S] * 300 + [NOW - DAY_S] * 290 + [NOW - 3000.0] * 10
    with SqlJournal(own) as journal:
        journal.write([entry for number, at in enumerate(ends) for entry in life(f"a{number:03}", at)])
    most_mb = _size_mb(own) - 0.06
    assert Retention(own, keep_days=30, keep_succeeded_days=3, history=0, most_mb=most_mb).prune(NOW) == 300
    # Then the journal is small enough. And where it never becomes so, what may come again stays
    assert Retention(own, keep_days=30, history=0, most_mb=0.001).prune(NOW) == 290
    assert len(tables.rows(own, "actions")) == 10


def _size_mb(engine: Engine) -> float:
    with engine.connect() as connection:
        return size_mb(connection)


def test_totals_count_what_was_rolled_up(engine: Engine, write: Any) -> None:
    rng = np.random.default_rng(1)
    executions = [float(seconds) for seconds in rng.lognormal(0.0, 1.5, 120)]
    entries: list[Entry] = []
    for number, execution_s in enumerate(executions):
        end = "failed" if number % 7 == 0 else "cancelled" if number % 11 == 0 else "succeeded"
        at = (OLD if number % 3 else RECENT) + 60.0 * number
        cause = {"failed": ("sandbox_failed", "disk_limit")[number % 2], "cancelled": "cancelled"}.get(end, "exit" if number % 5 else "")
        job = ("x", "y")[number % 2]
        entries += life(f"a{number}", at, job=job, execution_s=execution_s, status=end, cause=cause)
    write(*entries, make.environment("open", OLD, pod_cores=3), make.environment("closed", OLD + 10.0, pod_cores=3))
    reports = [lambda: act_report(engine), lambda: act_report(engine, Selection(jobs=("y",), kind="cpu.exec"))]
    before, found = [report() for report in reports], status(engine, NOW)
    assert pruned(engine) == 81
    # Then counts, sums and means are as before, and percentiles are as near as the histograms say
    for old, new in zip(before, [report() for report in reports], strict=True):
        assert new.pod_core_s == old.pod_core_s
        assert (list(new.by_job), list(new.by_kind)) == (list(old.by_job), list(old.by_kind))
        for was, is_now in [(old.total, new.total), *((old.by_job[job], new.by_job[job]) for job in old.by_job)]:
            assert (is_now.by_status, is_now.act.count) == (was.by_status, was.act.count)
            assert (is_now.by_cause, is_now.by_fault) == (was.by_cause, was.by_fault)
            parts = ("mean_queue_s", "mean_background_s", "mean_overhead_s", "mean_execution_s")
            for name in (*parts, "core_s_reserved", "cell_s_reserved", "core_s_used"):
                assert getattr(is_now, name) == pytest.approx(getattr(was, name)), name
            assert is_now.act.mean == pytest.approx(was.act.mean)
            for name in ("p50", "p95", "p99"):
                assert getattr(is_now.act, name) == pytest.approx(getattr(was.act, name), rel=0.03), name
    again = status(engine, NOW)
    assert (again.actions, again.environments, again.infra_failed) == (found.actions, found.environments, found.infra_failed)
    assert again.infra_failed == {"sandbox_failed": 9}


def test_hours_count_where_all_of_them_was_selected(engine: Engine, live: Any) -> None:
    hour = (OLD // 3600) * 3600
    live("a", hour + 60.0)
    assert pruned(engine) == 1
    for selection, count in (
        (Selection(since=hour), 1),
        (Selection(until=hour + 3600), 1),
        (Selection(since=hour + 1), 0),
        (Selection(until=hour + 3599), 0),
        (Selection(trajectory="t1"), 0),
        (Selection(kind="cpu.open"), 0),
    ):
        assert act_report(engine, selection).total.act.count == count, selection


def test_what_goes_later_is_added_to_its_hour(engine: Engine, live: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "BATCH", 2)
    for number in range(5):
        live(f"a{number}", OLD + 60.0 + number, execution_s=1.0)
    # When they are removed in two goes
    assert pruned(engine, now=OLD + 60.0 + 30 * DAY_S + 2.5) == 3
    assert pruned(engine) == 2
    row = tables.row(engine, "action_hours")
    assert (row["actions"], row["execution_s"], row["core_s"], row["cpu_s"]) == (5, 5.0, 20.0, 7.5)
    assert row["histograms"]["execution_s"] == {str(bin_of(1.0)): 5}


@pytest.mark.parametrize("doomed", ["action_hours", "earlier_grants", "actions"])
def test_a_batch_that_breaks_off_neither_loses_nor_doubles(engine: Engine, live: Any, doomed: str) -> None:
    live("a", OLD)
    before = tables.everything(engine)

    def break_off(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if statement.startswith(f"DELETE FROM {doomed}"):
            raise OSError("the power went out")

    event.listen(engine, "before_cursor_execute", break_off)
    try:
        with pytest.raises(Exception, match="power went out"):
            pruned(engine)
    finally:
        event.remove(engine, "before_cursor_execute", break_off)
    assert tables.everything(engine) == before
    assert pruned(engine) == 1
    assert tables.row(engine, "action_hours")["actions"] == 1
    assert status(engine, NOW).actions == {"succeeded": 1}


def test_what_durations_are_learned_from_stays(engine: Engine, live: Any) -> None:
    for number in range(10):
        live(f"a{number}", OLD + number, execution_s=float(number), status="failed" if number % 2 else "succeeded")
    learned = observations(engine, limit=3)
    assert pruned(engine, history=3) == 4
    assert observations(engine, limit=3) == learned
    assert len(learned) == 3


def test_what_recovery_reads_stays(engine: Engine, journal: SqlJournal, live: Any) -> None:
    # Given ends of the last hour, one of them not told yet, and one that drew on a quota
    now = time.time()
    live("lately", now - 60.0)
    journal.write([make.received("untold", now - 60.0), make.ended("untold", now - 50.0, status="lost", by_worker=False)])
    quota = {"cost": {"quota:search": [1]}}
    journal.write([make.received("spent", now - 60.0, **quota), make.granted("spent", now - 60.0), make.ended("spent", now - 59.0)])
    live("old", now - 2 * DAY_S)
    before = journal.unfinished()
    assert (len(before.ended), len(before.unpublished), len(before.spent)) == (3, 1, 1)
    assert Retention(engine, keep_days=1, history=0).prune(now) == 1
    assert journal.unfinished() == before


def test_the_cores_of_a_pod_stay_known_while_it_stands(engine: Engine, journal: SqlJournal, live: Any) -> None:
    # Given two pods that were opened long ago, one of which has been closed since
    for id in ("stands", "closed"):
        live(f"open-{id}", OLD, kind="cpu.open", environment=id)
        journal.write([make.environment("open", OLD, id=id, pod_cores=2)])
    journal.write([make.environment("closed", RECENT, id="closed", pod_cores=2)])
    assert Retention(engine, keep_days=30, history=0, most_mb=0.001).prune(NOW) == 1
    assert journal.unfinished().pods == {"stands": (4, 5)}


def test_the_actions_of_a_recorded_run_stay(engine: Engine, live: Any) -> None:
    # Given an old run, and actions of its job in its time and before, and of another job
    run_id = start_run(engine, policy="elastic", trace="x", jobs=["x"], options={}, started_at=OLD)
    finish_run(engine, run_id, summary={}, ended_at=OLD + 100.0)
    start_run(engine, policy="elastic", trace="broken off", jobs=["y"], options={}, started_at=OLD - 100.0)
    for id, at, job in (("in", OLD + 50.0, "x"), ("before", OLD - 50.0, "x"), ("other", OLD + 50.0, "y")):
        live(id, at, job=job)
    learned = observations(engine, of_run=load_run(engine, run_id))
    assert pruned(engine) == 2
    assert [row["id"] for row in tables.rows(engine, "actions")] == ["in"]
    assert observations(engine, of_run=load_run(engine, run_id)) == learned
    assert act_report(engine, Selection.of_run(load_run(engine, run_id))).total.by_status == {"succeeded": 1}


def test_only_the_scheduler_that_leads_removes(engine: Engine, live: Any) -> None:
    live("old", OLD)
    lease, other = Lease(engine, "scheduler", "a", 10.0), Lease(engine, "scheduler", "b", 10.0)
    lease.acquire(1.0)
    other.acquire(100.0)
    with pytest.raises(LeaseLost):
        Retention(engine, keep_days=30, history=0, lease=lease).prune(NOW)
    assert len(tables.rows(engine, "actions")) == 1
    assert Retention(engine, keep_days=30, history=0, lease=other).prune(NOW) == 1


def test_it_happens_by_itself_while_the_journal_is_written(engine: Engine, live: Any, write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "FIRST_LOOK_S", 0.0)
    monkeypatch.setattr(retention, "BATCH", 50)
    write(*(entry for number in range(150) for entry in life(f"old{number}", OLD + number)))
    with Pruning(Retention(engine, keep_days=30, history=0), clock=lambda: NOW):
        for number in range(50):
            live(f"a{number}", RECENT + number)
        assert wait_until(lambda: len(tables.rows(engine, "actions")) == 50, 60)
    assert status(engine, NOW).actions == {"succeeded": 200}


@pytest.mark.parametrize("seconds", [0.0, 1e-4, 1e-3, 0.7, 1.0, 59.0, 3e5])
def test_a_bin_is_as_wide_as_it_says(seconds: float) -> None:
    width = 2 ** (1 / BINS_PER_OCTAVE)
    assert seconds_of(bin_of(seconds)) == pytest.approx(seconds, rel=width - 1, abs=1e-4)


def test_days_are_set_by_a_number_or_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings().keep_days == 30
    for said, days in (("7", 7), ("0", 30), ("forever", "forever")):
        monkeypatch.setenv("TANGRAM_KEEP_DAYS", said)
        assert Settings().keep_days == days
    for wrong in ("-1", "never"):
        monkeypatch.setenv("TANGRAM_KEEP_DAYS", wrong)
        with pytest.raises(ValidationError):
            Settings()
