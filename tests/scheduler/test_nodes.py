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
    w = world().node("n0")
    w.run("a", 2, idempotent=True)
    w.lose("n0")
    assert [(r.id, r.reason) for r in w.of(commands.Requeue)] == [("a", "node n0 was lost: it burned")]
    w.node("n1")
    assert (w.grants["a"].node, w.grants["a"].attempt) == ("n1", 2)
    w.lose("n1")
    status, reason = w.ended("a")
    assert status == "lost"
    assert reason.startswith("node n1 was lost: it burned; ")
    assert "not tried again" in reason


def test_the_time_that_a_lost_action_ran_is_execution(world: Any) -> None:
    # Given an action that waited for a second, and started one second after its grant
    w = world().node(cores=1)
    w.run("first")
    w.run("a")
    w.tick(1.0)
    w.finish("first")
    w.tick(1.0)
    w.handle(events.Started(id="a", attempt=1, at=w.now))
    w.tick(5.0)
    w.lose()
    end = w.ends["a"]
    assert (end.status, end.queue_s, end.background_s, end.overhead_s, end.execution_s) == ("lost", 1.0, 0.0, 1.0, 5.0)


def test_an_action_that_was_being_stopped_is_not_tried_again(world: Any) -> None:
    w = world().node()
    w.run("a", idempotent=True)
    w.handle(events.Cancelled(ids=("a",)))
    w.lose()
    assert w.ends["a"].status == "lost"


def test_an_opening_environment_that_nobody_wants_any_more_is_not_opened_again(world: Any) -> None:
    w = world().node("n0").node("n1").open("e0", finish=False, trajectory="t")
    w.handle(events.Cancelled(job="default", trajectory="t"))
    w.lose(w.grants["open-e0"].node)
    assert w.ends["open-e0"].status == "lost"
    assert w.core.state.environments == {}


def test_a_report_about_an_earlier_try_is_ignored(world: Any) -> None:
    w = world().node("n0")
    w.run("a", idempotent=True)
    w.lose("n0")
    w.node("n1")
    w.handle(events.Finished(id="a", attempt=1, status="succeeded"))
    assert w.ends == {}
