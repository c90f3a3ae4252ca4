"""What comes out of the journal: figures, against sums done by hand and numpy, the status, runs, and the past of a job."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine

from app.journal.database import DatabaseError, snapshot
from app.journal.figures import Selection, act_report, observations
from app.journal.history import NodeSize, PastPod, declarations, history
from app.journal.runs import finish_run, load_run, start_run
from app.journal.status import status
from app.journal.writing import SqlJournal
from scheduler.learning.durations import Observation
from scheduler.live.entries import InstancesForgotten
from tangram.elasticity import FLAT, Amdahl, Table
from tests.sql import make, tables


def test_a_report_and_the_status_of_nothing_are_empty(engine: Engine) -> None:
    report, found = act_report(engine), status(engine, 1.0)
    assert (report.total.act.count, report.pod_core_s, report.by_kind, report.by_job) == (0, 0.0, {}, {})
    assert (found.nodes, found.services, found.environments, found.actions, found.oldest_wait_s) == ((), (), {}, {}, 0.0)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.floats(0, 1000), min_size=1, max_size=20))
def test_act_figures_are_those_of_numpy(shared_engine: Engine, executions: list[float]) -> None:
    tables.empty(shared_engine)
    with SqlJournal(shared_engine) as journal:
        journal.write([make.received(f"a{number}") for number in range(len(executions))])
        journal.write([make.ended(f"a{number}", execution_s=execution_s) for number, execution_s in enumerate(executions)])
    total = act_report(shared_engine).total
    acts = np.array(executions) + 1.25
    figures = [total.act.mean, total.act.p50, total.act.p95, total.act.p99, total.mean_execution_s]
    assert figures == pytest.approx([acts.mean(), *np.percentile(acts, [50, 95, 99]), acts.mean() - 1.25])
    assert (total.act.count, total.mean_queue_s, total.mean_overhead_s) == (len(executions), 1.0, 0.25)


def test_groups_are_by_kind_and_by_job(engine: Engine, write: Any) -> None:
    # Given actions of two kinds and two jobs, one that failed, one cancelled and one that waits
    write(make.received("a"), make.ended("a"))
    write(make.received("b", job="search", kind="api.call"), make.ended("b", execution_s=4.0, status="failed"))
    write(make.received("c"), make.ended("c", execution_s=99.0, status="cancelled"), make.received("d"))
    report = act_report(engine)
    # Then all are counted, and times are those of the actions that were carried out
    assert report.total.by_status == {"cancelled": 1, "failed": 1, "succeeded": 1, "waiting": 1}
    assert (report.total.act.count, report.total.act.mean) == (2, (3.25 + 5.25) / 2)
    assert {kind: stats.act.mean for kind, stats in report.by_kind.items()} == {"api.call": 5.25, "cpu.exec": 3.25}
    assert {job: dict(stats.by_status) for job, stats in report.by_job.items()} == {
        "coding": {"cancelled": 1, "succeeded": 1, "waiting": 1},
        "search": {"failed": 1},
    }


def test_core_seconds_reserved_and_used(engine: Engine, write: Any) -> None:
    # Given an action that held 2 cores for 1 s, lost its node, then 4 cores for 3 s, and one that held a cell for 5 s
    write(make.received(), make.granted(at=101.0), make.requeued(at=102.0))
    write(make.granted(at=110.0, attempt=2, units=4, core_ids=(0, 1, 2, 3)), make.ended(at=113.0, cpu_s=1.5, unit_s=14.0))
    write(make.received("g", kind="gpu.score", service="rm"), make.granted("g", at=1.0, units=1, core_ids=(), cell_ids=(0,)))
    write(make.ended("g", at=6.0, cpu_s=0.25, unit_s=5.0))
    # And one that still holds its cores, and an environment that held 3 cores for 7 s
    pod = [make.environment("open", 1.0, pod_cores=3), make.environment("closed", 8.0, pod_cores=3)]
    write(make.received("r"), make.granted("r"), *pod)
    report = act_report(engine)
    assert (report.total.core_s_reserved, report.total.cell_s_reserved, report.total.core_s_used) == (14.0, 5.0, 1.75)
    assert report.by_kind["cpu.exec"].core_s_reserved == 14.0
    assert report.by_kind["gpu.score"].cell_s_reserved == 5.0
    assert report.pod_core_s == report.pod_or_grant_core_s == 21.0
    assert replace(report, pod_core_s=0.0).pod_or_grant_core_s == 14.0


@pytest.mark.parametrize(
    ("selection", "count"),
    [
        (Selection(jobs=("coding",)), 2),
        (Selection(jobs=()), 0),
        (Selection(trajectory="t2"), 1),
        (Selection(kind="cpu.open"), 1),
        (Selection(since=150.0), 1),
        (Selection(until=150.0), 2),
        (Selection(jobs=("coding",), since=150.0), 0),
    ],
)
def test_a_selection_says_which_actions_count(engine: Engine, selection: Selection, count: int, write: Any) -> None:
    write(make.received("a"), make.ended("a"), make.received("b", kind="cpu.open", trajectory="t2"), make.ended("b"))
    write(make.received("c", 200.0, job="other"), make.ended("c"))
    assert act_report(engine, selection).total.act.count == count


def test_observations_are_the_last_successes_oldest_first(engine: Engine, write: Any) -> None:
    declared = [
        {"action_class": "pytest", "cost": {"cores": [1, 2, 4]}, "parallel_fraction": 0.9},
        {"action_class": "pytest"},
        {"kind": "gpu.score", "service": "rm", "environment": None, "cost": {"cells": [1, 2]}, "efficiency": {"1": 1.0, "2": 0.75}},
        {"job": "other", "cost": {}},
    ]
    for number, header in enumerate(declared):
        id, at = f"a{number}", 100.0 + 10 * number
        status = "timed_out" if number == 1 else "succeeded"
        write(make.received(id, at, **header), make.granted(id, at))
        write(make.ended(id, at + 4, status=status, dop=2, unit_s=6.0 if number == 0 else 0.0, cpu_s=float(number)))
    found = observations(engine)
    # Then each says what it declared, what it held on average and what it used
    usual = {"job": "coding", "kind": "cpu.exec", "action_class": None, "service": None, "environment": "e1"}
    usual |= {"held_units": 2.0, "execution_s": 2.0}
    scored = {"kind": "gpu.score", "service": "rm", "environment": None, "units": (1, 2), "curve": Table(((1, 1.0), (2, 0.75)))}
    assert found == [
        Observation(**{**usual, "action_class": "pytest", "units": (1, 2, 4), "curve": Amdahl(0.9), "held_units": 1.5, "cpu_s": 0.0}),
        Observation(**{**usual, **scored, "cpu_s": None}),
        Observation(**{**usual, "job": "other", "units": (1,), "curve": FLAT, "cpu_s": 3.0}),
    ]
    # And fewer are the last ones
    looks: list[int] = []
    assert observations(engine, limit=2, between=lambda: looks.append(1)) == found[1:]
    # And between any two of them a scheduler can renew its lease
    assert len(looks) == 2
    assert observations(engine, limit=0) == []


def test_what_an_action_held_in_its_last_try_is_taken_where_an_earlier_one_was_lost(engine: Engine, write: Any) -> None:
    write(make.received(), make.granted(), make.requeued(), make.granted(at=110.0, attempt=2))
    write(make.ended(at=112.0, dop=1, unit_s=99.0))
    assert [one.held_units for one in observations(engine)] == [1.0]


def test_status_says_what_waits_and_where_things_run(engine: Engine, write: Any) -> None:
    # Given two nodes of which one is lost, environments, and actions in several states
    write(make.node("up", 1.0), make.node("up", 1.0, name="a-lost-one"), make.node("lost", 2.0, name="a-lost-one"))
    write(make.environment("open", 1.0), make.environment("opening", 1.0, id="e2"), make.environment("closed", 1.0, id="e3"))
    write(make.received("r"), make.granted("r"), make.received("w", 100.0), make.received("v", 130.0, job="other"))
    write(make.received("d", 10.0), make.ended("d"))
    found = status(engine, 150.0)
    nodes = [(node.name, node.state, node.running, node.environments) for node in found.nodes]
    assert nodes == [("n1", "up", 1, 2), ("a-lost-one", "lost", 0, 0)]
    assert found.nodes[0].description["cores"] == 8
    assert found.environments == {"open": 1, "opening": 1, "closed": 1}
    assert found.actions == {"running": 1, "waiting": 2, "succeeded": 1}
    assert found.waiting_by_job == {"coding": 1, "other": 1}
    assert found.oldest_wait_s == 50.5


def test_status_says_where_services_are_and_what_they_hold(engine: Engine, write: Any) -> None:
    # Given a node that declares two services, one of them at work there, and a lost node on which a third was resident
    declared = {"judge": {"memory_mb": 500}, "idle": {"memory_mb": 1}}
    write(make.node("up", 1.0, services=declared), make.node("up", 1.0, name="n2", services={"old": {}}))
    counts = {"starts": 2, "restores": 0, "evictions": 1, "wrong_answers": 3}
    write(make.instance("starting", 2.0), make.instance("resident", 3.0, memory_mb=900.0, host_mb=450.0, **counts))
    write(make.instance("host", 3.0, service="old", node="n2", cell_ids=(0,), host_mb=7.0), make.node("lost", 4.0, name="n2"))
    header = {"kind": "gpu.score", "service": "judge", "environment": None}
    write(make.received("a", **header), make.granted("a", core_ids=(), cell_ids=(0, 1)))
    found = {service.name: service for service in status(engine, 5.0).services}
    (judge,) = found["judge"].instances
    assert (judge.node, judge.cells, judge.state, judge.running) == ("n1", (0, 1), "resident", 1)
    assert (judge.memory_mb, judge.host_mb, {name: getattr(judge, name) for name in counts}) == (900.0, 450.0, counts)
    assert (found["judge"].declared, found["idle"].instances) == ({"n1": {"memory_mb": 500}}, ())
    (old,) = found["old"].instances
    assert (found["old"].declared, old.state, old.reason, old.host_mb) == ({}, "lost", "node n2 is lost; it was host", 0.0)


def test_what_is_forgotten_of_a_node_is_absent_until_it_is_told_again(engine: Engine, write: Any) -> None:
    write(make.instance("resident", 1.0, memory_mb=5.0), make.instance("host", 1.0, cell_ids=(2,)))
    write(make.instance("resident", 1.0, node="n2"))
    # When the worker of one of them joins anew, with one of its instances
    write(InstancesForgotten(node="n1", at=2.0, reason="joined anew"), make.instance("host", 2.0, cell_ids=(2,)))
    rows = tables.rows(engine, "service_instances")
    assert [tuple(row[name] for name in ("node", "cells", "state", "reason", "memory_mb")) for row in rows] == [
        ("n1", "0,1", "absent", "joined anew", 0.0),
        ("n1", "2", "host", "", 0.0),
        ("n2", "0,1", "resident", "", 0.0),
    ]


def test_instances_of_nodes_that_left_for_good_are_deleted_when_another_joins(engine: Engine, write: Any) -> None:
    for name, state, at in (("old", "left", 10.0), ("recent", "lost", 50_000.0), ("up", "up", 10.0)):
        write(make.node("up", 1.0, name=name), make.instance("resident", 1.0, node=name), make.node(state, at, name=name))
    # When a worker joins more than a day after the first has left
    write(InstancesForgotten(node="n1", at=100_000.0, reason="joined anew"))
    assert {row["node"] for row in tables.rows(engine, "service_instances")} == {"recent", "up"}


def test_a_run_finds_its_actions_again(engine: Engine, write: Any) -> None:
    first = start_run(engine, policy="fcfs", trace="x.jsonl", jobs=["other"], options={}, started_at=10.0)
    run_id = start_run(engine, policy="elastic", trace="x.jsonl", jobs=["coding"], options={"nodes": 2}, started_at=50.0)
    for id, at, job in (("in", 60.0, "coding"), ("before", 40.0, "coding"), ("foreign", 60.0, "other")):
        write(make.received(id, at, job=job), make.ended(id))
    assert load_run(engine, run_id).ended_at is None
    finish_run(engine, run_id, summary={"mean_act": 1.0}, ended_at=90.0)
    run = load_run(engine, "last")
    assert (run.id, run.policy, run.options, run.summary) == (run_id, "elastic", {"nodes": 2}, {"mean_act": 1.0})
    assert act_report(engine, Selection.of_run(run)).total.act.count == 1
    assert load_run(engine, first).policy == "fcfs"


def test_a_run_that_was_broken_off_ends_with_the_next_one_of_its_job(engine: Engine, write: Any) -> None:
    # Given a run of two jobs without an end, one of another job after it, and one that shares a job
    words = {"policy": "elastic", "trace": "x.jsonl", "options": {}}
    broken = start_run(engine, jobs=["coding", "math"], started_at=50.0, **words)
    start_run(engine, jobs=["other"], started_at=60.0, **words)
    later = start_run(engine, jobs=["coding"], started_at=90.0, **words)
    for id, at in (("a", 55.0), ("b", 70.0), ("later", 95.0)):
        write(make.received(id, at, job="coding"), make.ended(id))
    counts = [act_report(engine, Selection.of_run(load_run(engine, run))).total.act.count for run in (broken, later)]
    assert counts == [2, 1] and load_run(engine, broken).ended_at is None


def test_a_run_that_is_not_there_is_named(engine: Engine) -> None:
    with pytest.raises(DatabaseError, match="no runs yet"):
        load_run(engine, "last")
    for look in (lambda: load_run(engine, "abc"), lambda: finish_run(engine, "abc", summary={}, ended_at=1.0)):
        with pytest.raises(DatabaseError, match="no run 'abc'"):
            look()


def test_the_past_of_a_job_is_its_actions_its_grants_its_pods_and_the_nodes_that_they_name(engine: Engine, write: Any) -> None:
    # Given an environment with two cores for itself, an action that lost its node and was granted again, one that waits, and another job
    write(make.node("up", 1.0), make.node("up", 1.0, name="n2", cores=4, cells=2), make.node("up", 1.0, name="idle"))
    opening = [make.received("o", 90.0, kind="cpu.open"), make.granted("o", 91.0), make.environment("open", 92.0, pod_cores=2)]
    write(*opening, make.ended("o", 92.0))
    write(make.received("b", 100.0), make.granted("b", 101.0), make.requeued("b", 102.0))
    again = make.granted("b", 103.0, attempt=2, node="n2", core_ids=(0,), units=1)
    write(again, make.resized("b", 104.0, attempt=2, core_ids=(0, 1)), make.ended("b", 106.0, unit_s=5.0))
    write(make.received("a", 99.0), make.received("x", 98.0, job="other"), make.granted("x", 99.0))
    write(make.environment("closed", 110.0, pod_cores=2))

    with snapshot(engine) as connection:
        found = history(connection, Selection(jobs=("coding",)))
        of_time = history(connection, Selection(since=99.0, until=100.0))

    assert [(one.id, one.status, one.attempts, one.ended_at) for one in found.actions] == [
        ("o", "succeeded", 1, 92.0),
        ("a", "waiting", 0, None),
        ("b", "succeeded", 2, 106.0),
    ]
    held = [(one.action, one.attempt, one.node, one.core_ids, one.granted_at, one.resized_at, one.released_at) for one in found.grants]
    assert held == [
        ("o", 1, "n1", [4, 5], 91.0, None, 92.0),
        ("b", 1, "n1", [4, 5], 101.0, None, 102.0),
        ("b", 2, "n2", [0, 1], 103.0, 104.0, 106.0),
    ]
    assert found.pods == [PastPod(node="n1", core_ids=[4, 5], opened_at=92.0, ended_at=110.0)]
    assert found.nodes == {"n1": NodeSize(8, 0), "n2": NodeSize(4, 2)}
    assert {one.id for one in of_time.actions} == {"b"}


def test_declarations_have_the_headers_and_the_services_that_they_name(engine: Engine, write: Any) -> None:
    services = {"judge": {"cells": [1]}, "unused": {"cells": [1]}}
    write(make.node("up", 1.0, cells=2, services=services))
    write(make.received("g", kind="gpu.score", service="judge", environment=None, cost={"cells": [1]}), make.ended("g"))
    write(make.received("c", 101.0, cost={"cores": [1, 4]}), make.received("x", job="other"))
    found = declarations(engine, Selection(jobs=("coding",)))
    assert [(one.past.id, one.header["cost"]) for one in found.actions] == [("g", {"cells": [1]}), ("c", {"cores": [1, 4]})]
    assert list(found.services) == ["judge"] and found.services["judge"]["cells"] == [1]
