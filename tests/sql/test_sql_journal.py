"""What the journal keeps of entries, and what a scheduler that starts over finds."""

from __future__ import annotations

import time
from typing import Any

import pytest
from sqlalchemy import Engine

from app.journal.status import status
from app.journal.writing import SqlJournal
from scheduler.live.entries import ActionGranted, EndsPublished, UnpublishedEnd
from scheduler.model import Grant, GrantFacts
from scheduler.model.commands import NoteDraining
from scheduler.model.copied import shared
from scheduler.model.events import EnvironmentGone
from tests.sql import make, tables


def held(entry: ActionGranted) -> tuple[Grant, float]:
    """What an action holds, by the entry of its grant, and since when."""
    return Grant(**shared(GrantFacts, entry)), entry.granted_at


def test_a_received_action_waits(engine: Engine, write: Any) -> None:
    entry = make.received(action_class="pytest", service="rm-a", cost={"quota:search": [1]}, priority=7)
    write(entry)
    row = tables.row(engine, "actions")
    said = {"job": "coding", "trajectory": "t1", "environment": "e1", "kind": "cpu.exec", "action_class": "pytest", "service": "rm-a"}
    said |= {"status": "waiting", "quota": "search", "priority": 7, "submitted_at": 99.5, "received_at": 100.0, "ended_at": None}
    assert {name: row[name] for name in said} == said
    assert tables.row(engine, "messages") == {"action": "a1", "message": entry.message}
    assert tables.row(engine, "jobs") == {"name": "coding", "first_seen_at": 100.0}


def test_a_whole_life_ends_with_times_and_without_the_message(engine: Engine, write: Any) -> None:
    for entry in (make.received(), make.granted(), make.ended(background_s=0.5)):
        write(entry)
    row = tables.row(engine, "actions")
    assert tables.rows(engine, "messages") == []
    assert (row["status"], row["node"], row["units"], row["attempts"]) == ("succeeded", "n1", 2, 1)
    assert row["action_class"] == row["kind"] == "cpu.exec", "without a class it is in that of its kind"
    assert (row["granted_at"], row["started_at"], row["ended_at"]) == (101.0, 101.0, 103.0)
    parts = ("queue_s", "background_s", "overhead_s", "execution_s", "act_s", "cpu_s")
    assert [row[part] for part in parts] == [1.0, 0.5, 0.25, 2.0, 3.75, 1.5]
    grant = tables.row(engine, "grants")
    assert (grant["resource"], grant["core_ids"], grant["cell_ids"]) == ("cores", [4, 5], [])
    assert (grant["granted_at"], grant["released_at"]) == (101.0, 103.0)


def test_the_message_of_an_end_without_a_worker_is_kept_until_the_result_is_stored(engine: Engine, journal: SqlJournal) -> None:
    # Given two ends lately that the scheduler itself has to store, one of them in the batch in which the action came in
    now = time.time()
    journal.write([make.received("a1", now), make.granted("a1", now)])
    lost = make.ended("a1", now, status="lost", reason="its node was lost", by_worker=False)
    journal.write([lost, make.received("a2", now), make.ended("a2", now, status="rejected", reason="no", by_worker=False)])
    assert journal.unfinished().unpublished == (
        UnpublishedEnd(id="a1", message='["args"]', status="lost", reason="its node was lost"),
        UnpublishedEnd(id="a2", message='["args"]', status="rejected", reason="no"),
    )
    journal.write([EndsPublished(ids=("a1",))])
    assert [end.id for end in journal.unfinished().unpublished] == ["a2"]
    assert tables.rows(engine, "messages") == [{"action": "a2", "message": '["args"]'}]


def test_a_requeued_action_waits_again_and_its_next_try_is_a_second_grant(engine: Engine, write: Any) -> None:
    write(make.received(), make.granted(), make.requeued())
    row = tables.row(engine, "actions")
    assert (row["status"], row["reason"], row["node"], row["attempts"]) == ("waiting", "node n1 was lost", None, 1)
    write(make.granted(at=104.0, attempt=2, node="n2"))
    row = tables.row(engine, "actions")
    assert (row["status"], row["reason"], row["node"], row["attempts"]) == ("running", "", "n2", 2)
    assert [grant["released_at"] for grant in tables.rows(engine, "grants")] == [102.0, None]


def test_a_redelivered_message_changes_nothing(engine: Engine, write: Any) -> None:
    write(make.received(), make.granted(), make.ended())
    before = tables.everything(engine)
    write(make.received(at=200.0))
    assert tables.everything(engine) == before


@pytest.mark.parametrize("commits", [1, 2])
def test_the_first_end_stands(engine: Engine, commits: int, write: Any) -> None:
    entries = [make.received(), make.granted(), make.ended(status="cancelled", reason="by the trainer"), make.ended(at=110.0)]
    for part in [entries] if commits == 1 else [entries[:3], entries[3:]]:
        write(*part)
    row = tables.row(engine, "actions")
    assert (row["status"], row["reason"], row["ended_at"]) == ("cancelled", "by the trainer", 103.0)


def test_unfinished_actions_come_back_in_order_of_reception_with_what_they_hold(journal: SqlJournal, write: Any) -> None:
    # Given, received at the same instant, actions that wait, run, and wait for their second try, and one that ended
    received = [make.received(id) for id in ("z", "running", "again", "done")]
    write(*received, *map(make.granted, ("running", "again", "done")), make.requeued("again"), make.ended("done"))
    found = journal.unfinished().actions
    assert [action.id for action in found] == ["z", "running", "again"]
    assert [(action.grant, action.granted_at) for action in found] == [(None, None), held(make.granted("running")), (None, None)]
    assert [action.unit_s for action in found] == [0.0, 0.0, 2.0]
    assert found[0].header == received[0].header
    assert (found[0].message, found[0].submitted_at, found[0].received_at) == ('["args"]', 99.5, 100.0)


def test_what_a_resized_action_holds_now_is_what_comes_back(engine: Engine) -> None:
    # Given two running actions, of which one was started in the background
    with SqlJournal(engine) as journal:
        journal.write([make.received("grows"), make.granted("grows", units=1, core_ids=(), background=True)])
        journal.write([make.received("stays"), make.granted("stays")])
        assert [action.grant.background for action in journal.unfinished().actions] == [True, False]
        # When that one is resized, more than once in a commit group
        journal.write([make.resized("grows", 102.0, core_ids=(4, 5)), make.resized("grows", 102.5, core_ids=(4, 5, 6))])
        journal.write([make.resized("grows", 103.0, core_ids=(), units=3)])
    # Then it comes back with what it holds after the last of them, since the start of its try
    with SqlJournal(engine) as journal:
        found = {action.id: (action.grant, action.granted_at) for action in journal.unfinished().actions}
        assert found == {
            "grows": held(make.granted("grows", units=3, core_ids=(), background=True)),
            "stays": held(make.granted("stays")),
        }
        assert [action.unit_s for action in journal.unfinished().actions] == [3.0, 0.0]
        row = tables.rows(engine, "grants")[0]
        assert (row["granted_at"], row["resized_at"]) == (101.0, 103.0)
        # And what it held last is what stays written, whatever crosses with its end
        journal.write([make.ended("grows", at=104.0, dop=3), make.resized("grows", 105.0, core_ids=(0, 1))])
        journal.write([make.resized("grows", 106.0, core_ids=(0, 1))])
    row = tables.rows(engine, "grants")[0]
    assert (row["core_ids"], row["units"], row["background"], row["resized_at"], row["released_at"]) == ([], 3, True, 103.0, 104.0)


def test_environments_and_nodes_come_back_until_they_are_gone(journal: SqlJournal) -> None:
    journal.write([make.environment("opening", 1.0), make.environment("open", 2.0, pod_cores=2, client="c1", used_at=2.0)])
    journal.write([make.environment("open", 9.0, pod_cores=2, client="c1", used_at=9.0)])
    journal.write([make.environment("open", 1.0, id="e2"), make.environment("closed", 3.0, id="e2")])
    journal.write([make.node("up", 1.0), make.node("up", 1.0, name="n2"), make.node("lost", 5.0, name="n2")])
    found = journal.unfinished()
    assert found.environments == [make.environment("open", 9.0, pod_cores=2, client="c1", used_at=9.0)]
    assert found.nodes == [make.node("up", 1.0)]


def test_environments_that_are_gone_are_known_for_a_while(journal: SqlJournal) -> None:
    now = time.time()
    # Given environments that were closed and lost lately, one that was lost long ago, and one that stands
    journal.write([make.environment("closed", now - 9.0, id="closed", reason="unused", node=None)])
    journal.write([make.environment("lost", now - 5.0, id="lost", reason="it burned")])
    journal.write([make.environment("lost", now - 86_400.0, id="old"), make.environment("open", now, id="open")])
    assert journal.unfinished().gone == (
        EnvironmentGone(id="closed", state="closed", node="", reason="unused", at=now - 9.0),
        EnvironmentGone(id="lost", state="lost", node="n1", reason="it burned", at=now - 5.0),
    )


def test_what_is_still_to_be_told_of_a_lost_environment_names_its_node(journal: SqlJournal) -> None:
    now = time.time()
    journal.write([make.received("a1", now), make.received("a2", now), make.environment("open", now)])
    lost = make.ended("a1", now, status="lost", reason="it burned", by_worker=False)
    cancelled = make.ended("a2", now, status="cancelled", reason="enough", by_worker=False)
    journal.write([lost, cancelled, make.environment("lost", now, reason="it burned")])
    assert [(end.id, end.environment_lost_on) for end in journal.unfinished().unpublished] == [("a1", "n1"), ("a2", "")]


def test_an_environment_keeps_the_times_of_its_life(engine: Engine, write: Any) -> None:
    for state, at in (("waiting", 1.0), ("opening", 2.0), ("open", 3.0), ("closing", 4.0), ("closed", 5.0)):
        write(make.environment(state, at))
    row = tables.row(engine, "environments")
    assert (row["state"], row["created_at"], row["opened_at"], row["changed_at"], row["ended_at"]) == ("closed", 1.0, 3.0, 5.0, 5.0)


def test_services_are_known_from_the_nodes_that_offer_them(engine: Engine, write: Any) -> None:
    write(make.node("up", 1.0, services={"rm-a": {"cells": 1}}), make.node("lost", 2.0))
    assert tables.row(engine, "services") == {"name": "rm-a", "node": "n1", "description": {"cells": 1}, "changed_at": 1.0}
    assert tables.row(engine, "nodes")["joined_at"] == 1.0


def test_what_is_kept_may_have_any_characters(engine: Engine, write: Any) -> None:
    said, kept = "a\0b \ud800 é", "a\N{REPLACEMENT CHARACTER}b ? é"
    excerpt = {"command": "false", "exit_code": 1, "stdout": said, "stderr": ""}
    write(make.received(), make.ended(status="failed", reason=said, excerpt=excerpt), make.received("a2"), make.ended("a2"))
    rows = {row["id"]: (row["reason"], row["excerpt"]) for row in tables.rows(engine, "actions")}
    assert rows == {"a1": (kept, {**excerpt, "stdout": kept}), "a2": ("", None)}


def test_a_node_drains_whatever_else_is_said_of_it_until_that_is_undone(engine: Engine, journal: SqlJournal) -> None:
    # Given a node that is drained in the batch in which it joins, and one that nobody knows
    journal.write([NoteDraining(name="n1", draining=True), NoteDraining(name="nobody", draining=True), make.node("up", 1.0)])
    assert [(node.name, node.draining) for node in status(engine, 2.0).nodes] == [("n1", True)]
    journal.write([make.node("up", 2.0, cores=4)])
    journal.write([make.node("lost", 3.0)])
    assert journal.unfinished().draining == ("n1",)
    journal.write([make.node("up", 4.0)])
    assert journal.unfinished().draining == ("n1",)
    journal.write([NoteDraining(name="n1", draining=True), NoteDraining(name="n1", draining=False)])
    assert journal.unfinished().draining == ()
