"""Nodes that are lost, come back, or beat without working; and what becomes of their actions."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.model import commands, events


@pytest.mark.parametrize("woken", [True, False])
def test_a_queue_deadline_holds_again_when_an_action_waits_again(world: Any, woken: bool) -> None:
    # Given an action that starts before its deadline, whether or not anyone asked the core for its next wake meanwhile
    w = world().node("n0")
    w.run("a", idempotent=True, queue_timeout_s=5.0)
    if woken:
        assert w.core.next_wake(w.now) is None

    w.now = 2.0
    w.lose("n0")
    w.tick(3.0)

    assert w.ends["a"].status == "timed_out"


def test_an_action_that_lost_two_nodes_is_not_tried_a_third_time(world: Any) -> None:
    # Given an idempotent action, which waits again when its node is lost
    w = world().node("n0")
    w.run("a", 2, idempotent=True)
    w.lose("n0")
    assert [(r.id, r.reason) for r in w.of(commands.Requeue)] == [("a", "node n0 was lost: it burned")]
    w.node("n1")
    assert (w.grants["a"].node, w.grants["a"].attempt) == ("n1", 2)
    # When the next node is lost, too
    w.lose("n1")

    status, reason = w.ended("a")
    assert status == "lost"
    assert reason.startswith("node n1 was lost: it burned; ")
    assert "not tried again" in reason


def test_an_action_that_is_not_idempotent_is_lost_with_its_node(world: Any) -> None:
    w = world().node()
    w.run("a")

    w.lose()

    assert w.ended("a") == ("lost", "node n0 was lost: it burned")
    assert w.ends["a"].by_worker is False


def test_an_action_whose_result_its_lost_node_had_stored_has_ended_as_that_says(world: Any) -> None:
    # Given two commands of an environment, one after the other, and an action that may be repeated
    w = world().node(cores=2).open("e")
    w.exec("first", "e", session="s")
    w.exec("second", "e", session="s")
    w.run("again", idempotent=True)
    w.now = 3.0
    # When their node is lost, and two of them have results
    ended = (
        events.StoredEnd(id="first", status="succeeded", execution_s=2.0, cpu_s=1.5),
        events.StoredEnd(id="again", status="failed", reason="ValueError: no"),
    )
    w.handle(events.NodeLost(name="n0", reason="it burned", ended=ended))
    # Then these count, nobody else has to store them, and nothing is run again
    assert w.ended("first")[0] == "succeeded"
    assert (w.ends["first"].by_worker, w.ends["first"].execution_s, w.ends["first"].cpu_s) == (True, 2.0, 1.5)
    assert w.ended("again") == ("failed", "ValueError: no")
    assert w.of(commands.Requeue) == []
    # And what had none is lost as before
    assert w.ended("second") == ("lost", "environment e is lost: node n0 was lost: it burned")


def test_an_action_that_was_being_stopped_is_not_tried_again(world: Any) -> None:
    w = world().node()
    w.run("a", idempotent=True)
    w.handle(events.Cancelled(ids=("a",)))

    w.lose()

    assert w.ends["a"].status == "lost"


def test_an_environment_that_was_opening_opens_elsewhere(world: Any) -> None:
    w = world(starting_limit=1).node("n0").open("e0", finish=False)
    w.exec("a", "e0")
    w.lose("n0")
    w.node("n1")

    w.finish("open-e0")

    assert w.grants["a"].node == "n1"


def test_an_opening_environment_that_nobody_wants_any_more_is_not_opened_again(world: Any) -> None:
    w = world().node("n0").node("n1").open("e0", finish=False, trajectory="t")
    w.handle(events.Cancelled(job="default", trajectory="t"))

    w.lose(w.grants["open-e0"].node)

    assert w.ends["open-e0"].status == "lost"
    assert w.core.state.environments == {}


def test_a_node_that_joins_again_has_restarted(world: Any) -> None:
    w = world().node(cores=2)
    w.run("a", 2)
    w.run("b", 2)

    w.node(cores=2)

    assert w.ended("a") == ("lost", "node n0 was lost: its worker was restarted")
    assert w.grants["b"].core_ids == (0, 1)


def test_a_node_that_left_says_so(world: Any) -> None:
    w = world().node()

    w.handle(events.NodeLost(name="n0", reason="its worker was stopped", left=True))

    assert [(n.state, n.reason) for n in w.of(commands.NoteNode)] == [("up", ""), ("left", "its worker was stopped")]


def test_a_report_about_an_earlier_try_is_ignored(world: Any) -> None:
    w = world().node("n0")
    w.run("a", idempotent=True)
    w.lose("n0")
    w.node("n1")

    w.handle(events.Finished(id="a", attempt=1, status="succeeded"))

    assert w.ends == {}


def test_the_parts_of_an_act_add_up(world: Any) -> None:
    w = world().node(cores=1)
    w.run("first")
    w.now = 1.0
    w.run("a")
    w.now = 4.0
    w.finish("first")
    w.now = 10.0

    w.finish("a", execution_s=5.0)

    end = w.ends["a"]
    assert (end.queue_s, end.overhead_s, end.execution_s) == (3.0, 1.0, 5.0)
