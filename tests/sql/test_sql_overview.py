"""What the live page reads of the journal, on both databases: the present, the last hour, lists, one action, why it waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from sqlalchemy import Engine, event, select
from sqlalchemy.exc import ResourceClosedError

from app.journal.database import snapshot
from app.journal.detail import action_detail, environment_detail, job_detail, node_detail
from app.journal.figures import Selection, act_report
from app.journal.lanes import Lanes
from app.journal.listing import ActionFilter, list_actions, list_environments
from app.journal.models import Action, table
from app.journal.overview import overview, read_present
from app.journal.recent import Recent
from app.journal.status import status
from app.journal.waits import Fact, explain
from app.journal.writing import SqlJournal
from scheduler.model.commands import NoteDraining
from tests.sql import make

NOW = 10_000.0
SHOWN: dict[str, Any] = {
    "policy": "elastic",
    "epoch": 1,
    "queues": [{"kind": "cores", "name": "n1", "waiting": 2, "first": ["first", "second"]}],
    "jobs": {"coding": {"share": 0.9, "share_of": "cores", "entitlement": 0.5, "over": True}},
    "nodes": {"n1": {"beat_ago_s": 0.3, "busy_cores": 1.5}},
}


@pytest.fixture
def filled(engine: Engine, write: Any) -> Engine:
    """Node n1 of two cores: `runs` holds both, `first` and `second` wait, `over` has ended well, `gone` by our fault."""
    write(
        make.node("up", NOW - 500, cores=2, kinds=["cpu"], labels=["isolation:none"]),
        make.environment("open", NOW - 400),
        make.received("over", NOW - 300),
        make.granted("over", NOW - 299),
        make.ended("over", NOW - 290),
        make.received("gone", NOW - 200, job="unlucky"),
        make.granted("gone", NOW - 199),
        make.ended("gone", NOW - 190, status="lost", reason="node n1 was lost", by_worker=False, cause="node_lost"),
        make.received("runs", NOW - 100, job="holder", trajectory="t2"),
        make.granted("runs", NOW - 99, core_ids=(0, 1)),
        make.received("first", NOW - 50, cost={"cores": [1]}, environment="e1"),
        make.received("second", NOW - 40, cost={"cores": [1]}, environment="e1"),
    )
    return engine


def read(recent: Recent, engine: Engine, now: float) -> None:
    with snapshot(engine) as connection:
        recent.read(connection, now)


def looked(engine: Engine, shown: Any) -> dict[str, Any]:
    """Return the overview."""
    recent = Recent()
    read(recent, engine, NOW)
    with snapshot(engine) as connection:
        return overview(read_present(connection, NOW), recent, shown)


def why(engine: Engine, shown: Any, *ids: str) -> dict[str, Sequence[Fact]]:
    """Return why actions wait, all of them unless some are named."""
    with snapshot(engine) as connection:
        rows = {row.id: row for row in connection.execute(select(table(Action)))}
        return {id: explain(connection, rows[id], shown, NOW) for id in ids or rows}


def texts(engine: Engine, shown: Any, *ids: str) -> dict[str, list[str]]:
    return {id: [fact.text for fact in facts] for id, facts in why(engine, shown, *ids).items()}


def test_the_overview_puts_the_present_and_the_last_hour_together(filled: Engine) -> None:
    found = looked(filled, SHOWN)
    assert found["cores"] == {"total": 2, "granted": 2, "idle": 0, "used": 1.5}
    assert found["queue"] == [{"job": "coding", "kind": "cpu.exec", "waiting": 2, "oldest_s": 50.5}]
    assert (found["waiting"], found["running"], found["environments"]) == (2, 1, {"open": 1})
    assert (found["recent"]["ended"], found["recent"]["ours"], found["recent"]["causes"]) == (2, 1, {"node_lost": 1})
    assert [(job["name"], job["ours"]) for job in found["jobs"]] == [("unlucky", 1), ("coding", 0), ("holder", 0)]
    (node,) = found["nodes"]
    assert (node["cores_granted"], node["ours"], node["isolation"], node["memory_held_mb"]) == (2, 1, "none", 512)


def test_an_action_whose_environment_is_paused_says_who_holds_the_memory(filled: Engine, write: Any) -> None:
    # Given two environments on a node that grants memory by action, one of which is paused
    write(
        make.environment("open", NOW - 90, id="e2", memory_mb=900, job="hungry"),
        make.received("grows", NOW - 80, environment="e1"),
        make.granted("grows", NOW - 79, core_ids=(0,)),
        make.received("calm", NOW - 80, environment="e2"),
        make.granted("calm", NOW - 79, core_ids=(1,)),
    )
    memory = {"granted_mb": 700, "held_mb": 500, "reserve_mb": 200, "paused_count": 1, "paused": {"e1": 4.0}}
    shown = {**SHOWN, "nodes": {"n1": {**SHOWN["nodes"]["n1"], "memory": memory}}}
    said = why(filled, shown, "grows", "calm")
    assert [fact.text for fact in said["grows"]] == [
        "Its environment wants more memory than it was granted, and has been paused for 4.0 s.",
        "700 MB of node n1 are granted to its environments, and 200 MB are kept, so that one of them at a time may grow to its limit.",
    ]
    assert [(holder.id, holder.job, holder.holds) for holder in said["grows"][1].holders] == [("e2", "hungry", "a limit of 900 MB")]
    assert not said["calm"]


def test_what_a_breaker_holds_back_and_a_node_that_rests_are_told(engine: Engine, write: Any) -> None:
    # Given a job that is held back, with an open, a command in its environment, a task and a command in an environment that is open
    write(
        make.node("up", NOW - 500, cores=2, kinds=["cpu"]),
        make.environment("open", NOW - 400),
        make.environment("waiting", NOW - 20, id="later"),
        make.received("open", NOW - 20, kind="cpu.open", environment="later", cost={}),
        make.received("parked", NOW - 20, environment="later"),
        make.received("task", NOW - 10, kind="build", environment=None, cost={}),
        make.received("tried", NOW - 10, kind="build", environment=None, cost={}),
        make.received("goes on", NOW - 5, environment="e1", cost={}),
    )
    held = {"waiting": 2, "ours": 6, "ended": 21, "held_s": 4.0, "next_in_s": 3.25, "trials": ["tried"]}
    shown = {"held_back": {"coding": held}, "nodes": {"n1": {"beat_ago_s": 0.1, "busy_cores": None, "rests_s": 7.5}}}
    told, found = texts(engine, shown), looked(engine, shown)
    back = "Job coding is held back: 6 of 21 actions that ended within a minute failed by a fault of this system."
    assert told["task"][0].startswith(back) and told["open"][0].startswith(back) and told["parked"][1].startswith(back)
    assert "Node n1 rests for 7.5 s more: environments could not be opened there, or died there." in told["open"]
    assert not any("held back" in text for text in (*told["goes on"], *told["tried"]))
    assert (found["jobs"][0]["held_back"], found["nodes"][0]["rests_s"]) == (held, 7.5)


def test_cores_of_pods_are_granted_whether_an_action_runs_on_them_or_not(engine: Engine, write: Any) -> None:
    # Given a node of eight cores with a pod in use, one that is idle, one that is being opened, and a task outside of all
    write(
        make.node("up", NOW - 500, cores=8, kinds=["cpu"]),
        make.environment("open", NOW - 400, id="used", pod_cores=2),
        make.environment("open", NOW - 400, id="idle", pod_cores=2),
        make.environment("closed", NOW - 300, id="gone", pod_cores=2),
        make.environment("opening", NOW - 5, id="opened", pod_cores=2),
        make.received("exec", NOW - 50, environment="used"),
        make.granted("exec", NOW - 49, core_ids=(0, 1)),
        make.received("open", NOW - 5, kind="cpu.open", environment="opened", cost={}),
        make.granted("open", NOW - 5, core_ids=(4, 5)),
        make.received("task", NOW - 5, kind="build", environment=None),
        make.granted("task", NOW - 5, core_ids=(6,)),
        make.received("waits", NOW - 1, kind="build", environment=None, cost={"cores": [1]}),
    )
    found, waits = looked(engine, SHOWN), why(engine, {}, "waits")["waits"]
    assert found["cores"] == {"total": 8, "granted": 7, "idle": 1, "used": 1.5}
    assert (found["nodes"][0]["cores_granted"], found["environments"]) == (7, {"open": 2, "opening": 1})
    assert [fact.text for fact in waits] == ["It needs 1 core of node n1: 7 of 8 are held."]
    assert sorted(one.id for one in waits[0].holders) == ["idle", "opened", "task", "used"]


def test_what_ended_an_hour_ago_counts_no_longer(filled: Engine) -> None:
    recent = Recent()
    read(recent, filled, NOW)
    assert sum(ended.actions for ended in recent) == 2
    read(recent, filled, NOW + 3600)
    assert list(recent) == []


def test_a_minute_that_was_not_over_at_the_last_look_is_read_again(filled: Engine, write: Any) -> None:
    # Given a look in the first seconds of a minute
    recent, minute = Recent(), NOW // 60 * 60
    read(recent, filled, minute + 5)
    # When actions fail in this minute and in the one before it, and the next look is ten minutes later
    lost: dict[str, Any] = {"status": "lost", "by_worker": False, "cause": "node_lost"}
    write(make.ended("first", minute + 20, **lost), make.ended("second", minute - 1, **lost))
    read(recent, filled, minute + 600)
    assert sum(ended.actions for ended in recent if ended.ours) == 3


def test_the_close_of_a_lost_environment_is_no_failure(filled: Engine, write: Any) -> None:
    # Given a job whose environment was lost, and closed after that
    lost: dict[str, Any] = {"status": "lost", "by_worker": False, "cause": "environment_lost", "kind": "cpu.close"}
    write(make.received("close", NOW - 10, kind="cpu.close", job="closing", cost={}))
    write(make.ended("close", NOW - 9, **lost))
    recent = Recent()
    with snapshot(filled) as connection:
        recent.read(connection, NOW)
        row = connection.execute(select(table(Action)).where(Action.id == "close")).one()
        job = job_detail(connection, "closing", recent, NOW)
    report = act_report(filled, Selection(jobs=("closing",))).total
    # Then its cause is kept, and nobody is to blame
    assert (row.cause, row.fault) == ("environment_lost", "")
    assert job is not None and (job.total.ended, job.total.ours, job.failures) == (1, 0, [])
    assert (report.by_status, report.by_cause, report.by_fault) == ({"lost": 1}, {}, {})
    assert status(filled, NOW).infra_failed == {"node_lost": 1}


def test_why_names_the_holders_the_place_in_the_queue_and_the_share(filled: Engine) -> None:
    (needs, place, share), of_running = why(filled, SHOWN, "second", "runs").values()
    assert needs.text == "It needs 1 core of node n1, where its environment is: 2 of 2 are held."
    assert [(holder.id, holder.holds) for holder in needs.holders] == [("runs", "2 cores")]
    assert place.text == "It is number 2 of 2 in the queue for the cores of node n1."
    assert [holder.id for holder in place.holders] == ["first"]
    assert "Job coding holds 90% of all cores; its entitlement is 50%." in share.text
    assert of_running == ()
    assert texts(filled, None, "second")["second"][0].startswith("No scheduler shows itself")


def test_an_action_without_an_environment_has_one_place_in_the_queue_for_any_node(engine: Engine, write: Any) -> None:
    # Given five nodes, and twenty tasks that wait for cores of any of them
    names = [f"t{number:02}" for number in range(20)]
    write(*[make.node("up", NOW - 500, name=f"n{number}", cores=2, kinds=["cpu"]) for number in range(5)])
    write(*[make.received(name, NOW - 50, kind="build", environment=None, cost={"cores": [1]}) for name in names])
    shown = {"queues": [{"kind": "cores", "name": "", "waiting": 30, "first": names}]}
    asked: list[str] = []
    with snapshot(engine) as connection:
        row = connection.execute(select(table(Action)).where(Action.id == "t19")).one()
        event.listen(connection, "before_cursor_execute", lambda *call: asked.append(call[2]))
        facts = explain(connection, row, shown, NOW)
    needs = [f"It needs 1 core of node n{number}: 0 of 2 are held." for number in range(5)]
    assert [fact.text for fact in facts] == [*needs, "It is number 20 of 30 in the queue for cores of any node."]
    assert [(holder.id, holder.holds) for holder in facts[-1].holders] == [(name, f"place {n + 1}") for n, name in enumerate(names[:19])]
    # and the journal is asked once a node, once each for nodes and pods, and once for all places
    assert len(asked) == 8, asked


def test_what_needs_no_cores_is_not_said_to_wait_for_any(filled: Engine, write: Any) -> None:
    # Given an environment on a node whose cores are held, one that has cores of its own, and files to be read in each
    write(
        make.environment("open", NOW - 400, id="pod", pod_cores=1),
        *(make.received(id, NOW - 5, kind="cpu.read_file", cost={}, environment=id) for id in ("e1", "pod")),
    )
    assert not any(why(filled, {**SHOWN, "jobs": {}}, "e1", "pod").values())


def test_an_open_says_which_environments_hold_the_memory(engine: Engine, write: Any) -> None:
    # Given a node whose memory is taken
    write(
        make.node("up", NOW - 500, cores=2, kinds=["cpu"], memory_mb=1000),
        make.environment("open", NOW - 400, memory_mb=800),
        make.received("open", NOW - 5, kind="cpu.open", cost={"memory_mb": [300]}, environment="e2"),
        make.environment("waiting", NOW - 5, id="e2", node=None, memory_mb=300),
        make.received("exec", NOW - 4, cost={"cores": [1]}, environment="e2"),
    )
    opening, within = why(engine, {}, "open", "exec").values()
    assert opening[0].text == "It needs 300 MB; node n1 has 200 of 1000 MB free."
    assert [(holder.sort, holder.id) for holder in opening[0].holders] == [("environment", "e1")]
    # and who waits for that environment is led to the same
    assert within[0].text == "Its environment waits for a place." and within[0].holders[0].id == "open"
    assert within[1] == opening[0]


def test_an_open_says_which_environments_hold_the_places_of_a_node(engine: Engine, write: Any) -> None:
    # Given a node that is full of environments, one that has a place, and one that bounds their number by nothing
    write(
        *(make.node("up", NOW - 500, name=f"n{most}", cores=2, kinds=["cpu"], environments_max=most) for most in (1, 2, None)),
        *(make.environment("open", NOW - 400, id=f"on-{name}", node=name) for name in ("n1", "n2", "nNone")),
        make.received("open", NOW - 5, kind="cpu.open", cost={}, environment="e2"),
    )
    (opening,) = why(engine, {}, "open").values()
    assert [fact.text for fact in opening] == ["Node n1 holds 1 environment, and takes 1 at most."]
    assert [(holder.sort, holder.id) for holder in opening[0].holders] == [("environment", "on-n1")]


def test_why_names_a_draining_node_where_that_keeps_an_action_waiting(engine: Engine, write: Any) -> None:
    # Given a node of everything that is draining, and one that is not but has no GPUs
    services = {"rm": {"cells": [1]}}
    write(
        make.node("up", NOW - 500, name="n1", cores=2, kinds=["cpu", "gpu", "api"], services=services, labels=["big"]),
        make.node("up", NOW - 500, name="n2", cores=2, kinds=["cpu"]),
        NoteDraining(name="n1", draining=True),
        make.environment("open", NOW - 400, node="n1"),
        make.received("open", NOW - 9, kind="cpu.open", environment="e2"),
        make.received("large", NOW - 8, kind="build", environment=None, cost={"cores": [2]}),
        make.received("big", NOW - 8, kind="build", environment=None, cost={"cores": [2]}, requires=["big"]),
        make.received("nothing", NOW - 8, kind="build", environment=None, cost={}),
        make.received("score", NOW - 7, kind="gpu.score", environment=None, service="rm", cost={}),
        make.received("call", NOW - 6, kind="api.call", environment=None, cost={"quota:search": [1]}),
        make.received("within", NOW - 5, cost={"cores": [1]}, environment="e1"),
    )
    facts = texts(engine, {})
    # Then it is named where it is why, and what else there is to wait for is told of the others alone
    draining = "Node n1 is draining: what could run elsewhere does not begin there."
    assert all(draining in facts[name] for name in ("open", "large", "big", "nothing", "score", "call"))
    assert facts["large"][1] == "It needs 2 cores of node n2: 0 of 2 are held."
    assert facts["big"] == facts["score"] == facts["call"] == [draining]
    # and not where an action is bound to it
    assert facts["within"] == ["It needs 1 core of node n1, where its environment is: 0 of 2 are held."]


def test_why_names_a_silent_node_also_where_an_action_is_bound_to_it(engine: Engine, write: Any) -> None:
    # Given a node that is silent, an environment on it, what could only run there, and a request that may be under way
    write(
        make.node("silent", NOW - 20, name="n1", cores=2, kinds=["cpu", "api"]),
        make.environment("open", NOW - 400, node="n1"),
        make.received("call", NOW - 60, kind="api.call", environment=None, cost={"quota:search": [1]}),
        make.granted("call", NOW - 59, node="n1"),
        make.received("open", NOW - 9, kind="cpu.open", environment="e2"),
        make.received("build", NOW - 8, kind="build", environment=None, cost={"cores": [2]}),
        make.received("within", NOW - 5, cost={"cores": [1]}, environment="e1"),
    )
    facts = texts(engine, {})
    silent = "Node n1 is silent: nothing begins there until it beats again. If it does not, it is lost."
    assert facts["open"] == facts["within"] == facts["call"] == [silent] and facts["build"][0] == silent


def test_why_names_the_nodes_of_the_shard_of_an_action_alone(engine: Engine, write: Any) -> None:
    waits = {"kind": "build", "environment": None, "cost": {"cores": [4]}}
    write(make.node("up", NOW - 500, name="n1", cores=2, kinds=["cpu"]), make.received("here", NOW - 9, **waits))
    with SqlJournal(engine, shard=1) as journal:
        journal.write([make.received("there", NOW - 9, **waits)])
    facts = texts(engine, {})
    assert facts["here"] == ["It needs 4 cores of node n1: 0 of 2 are held."]
    assert facts["there"] == ["No node of the pool cpu is up in shard 1, to which it belongs."]


def test_lists_are_paged_and_filtered(engine: Engine, write: Any) -> None:
    write(*[make.received(f"w{number:02}", NOW - 100 + number) for number in range(60)])
    write(*[make.received(f"e{number:02}", NOW - 200 + number) for number in range(60)])
    write(*[make.ended(f"e{number:02}", NOW - 90 + number) for number in range(60)])
    with snapshot(engine) as connection:
        pages = [list_actions(connection, ActionFilter(), page, NOW) for page in range(3)]
        found = list_actions(connection, ActionFilter(q="E0", state="succeeded"), 0, NOW)
        odd = list_actions(connection, ActionFilter(q="%"), 0, NOW)
        none = list_environments(connection, "", "", "", 0, NOW)
    ids = [row.id for page in pages for row in page.rows]
    assert ids == [f"w{number:02}" for number in range(60)] + [f"e{number:02}" for number in reversed(range(60))]
    assert [page.more for page in pages] == [True, True, False]
    assert {row.id for row in found.rows} == {f"e0{number}" for number in range(10)}
    assert odd.rows == [] and none.rows == []


def test_details_tell_the_way_of_an_action_and_who_failed_a_job(filled: Engine) -> None:
    recent = Recent()
    with snapshot(filled) as connection:
        recent.read(connection, NOW)
        action = action_detail(connection, "over", SHOWN, NOW)
        job, node = job_detail(connection, "unlucky", recent, NOW), node_detail(connection, "n1", NOW)
        environment = environment_detail(connection, "e1")
        unknown = action_detail(connection, "none", SHOWN, NOW)
    way = ["submitted by its trainer", "received by the scheduler", "attempt 1", "started by its worker", "ended"]
    assert action is not None and [step.what.split(":")[0] for step in action.way] == way
    assert job is not None and [row.id for row in job.failures] == ["gone"] and job.total.ours == 1
    assert node is not None and [row.id for row in node.failures] == ["gone"] and [row.id for row in node.running] == ["runs"]
    assert environment is not None and {row.id for row in environment.actions} >= {"over", "first", "second"}
    assert unknown is None


def look(lanes: Lanes, engine: Engine, now: float) -> None:
    with snapshot(engine) as connection:
        lanes.read(connection, read_present(connection, now))


def test_the_timeline_closes_what_has_given_its_cores_back(filled: Engine, write: Any) -> None:
    lanes = Lanes(NOW)
    look(lanes, filled, NOW)
    first = lanes.since(0)
    assert [bar[:5] for bar in first["bars"] if bar[0] == "runs"] == [["runs", "n1", [0, 1], -99_000, None]]
    # When it goes to the background
    write(make.resized("runs", NOW + 1, core_ids=(), units=2))
    look(lanes, filled, NOW + 2)
    assert [(bar[0], bar[4]) for bar in lanes.since(first["version"])["bars"]] == [("runs", 2000)]


def test_the_timeline_reads_what_ended_before_a_look_that_failed(filled: Engine, write: Any) -> None:
    lanes = Lanes(NOW)
    look(lanes, filled, NOW)
    # When an action ends, the next look fails, and the one after that does not
    write(make.ended("runs", NOW + 5))
    with snapshot(filled) as connection:
        present = read_present(connection, NOW + 20)
    with pytest.raises(ResourceClosedError):
        lanes.read(connection, present)
    look(lanes, filled, NOW + 21)
    (bar,) = (bar for bar in lanes.since(0)["bars"] if bar[0] == "runs")
    assert (bar[4], bar[7]) == (5000, "succeeded")
