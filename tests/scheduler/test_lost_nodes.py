"""When a node counts as lost, what becomes of what it ran, and what it gives up when it comes back."""

from __future__ import annotations

from typing import Any

import pytest

from app.broker.transport import KombuTransport
from scheduler.live.heartbeats import RETURN_S
from scheduler.model import commands, events

from .deployed import BEAT_S, Cluster

LIMIT_S = 3 * BEAT_S
IDLE = ("lost", "it beats but does not run what it was handed")
GONE = ("lost", "no beat for 3 s")
UP = ("up", "")


@pytest.mark.parametrize(("lost_connections", "more_s"), [(1, RETURN_S), (0, 0.0)], ids=["the broker was away", "beats wait unread"])
def test_silence_counts_only_while_the_scheduler_has_heard_all_there_is(
    lost_connections: int, more_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a scheduler that hears no beats, since it has lost the broker or has more to read; when that is for long, then no node is lost
    cluster = Cluster()
    monkeypatch.setattr(KombuTransport, "caught_up", False)
    monkeypatch.setattr(cluster.transport, "lost_connections", lost_connections)
    cluster.wait(60.0)
    # And when it has caught up, nodes have a while to be heard, and no more
    monkeypatch.setattr(KombuTransport, "caught_up", True)
    cluster.wait(more_s + LIMIT_S)
    assert cluster.states() == [UP]
    cluster.wait(1.0)
    assert cluster.states() == [UP, GONE]


def test_silence_does_not_count_while_the_scheduler_stands_still() -> None:
    # Given a scheduler that was frozen for a minute; when it goes on, then a node has the usual time to be heard, and no more
    cluster = Cluster()
    cluster.wait(1.0)
    cluster.now += 60.0
    cluster.wait(LIMIT_S)
    assert cluster.states() == [UP]
    cluster.wait(1.0)
    assert cluster.states() == [UP, GONE]


def test_a_node_that_beats_but_never_takes_up_its_action_is_lost() -> None:
    cluster = Cluster()
    cluster.submit("a", idempotent=True)
    cluster.submit("b")
    for _ in range(3):
        cluster.beat("b")
    assert cluster.states() == [UP]
    cluster.beat("b")
    assert cluster.states()[1] == IDLE
    assert cluster.waiting == ["a"]


def test_a_node_that_is_late_with_much_is_not_lost_while_it_takes_some_up() -> None:
    # Given a node that has been handed more than it can take up in three beats
    cluster = Cluster()
    cluster.submit(*(f"a{number}" for number in range(8)))
    # When between any two beats it takes one up, which runs then or has ended by then
    for beat in range(5):
        if beat % 2:
            cluster.told({"type": "started", "id": f"a{beat}", "attempt": 1, "at": cluster.now}, cluster.finished(f"a{beat}"))
        runs = [f"a{number}" for number in range(0, beat + 1, 2)]
        cluster.beat(*runs)
    for _ in range(3):
        assert cluster.states() == [UP]
        cluster.beat(*runs)
    cluster.beat(*runs)
    assert cluster.states()[1] == IDLE


def test_a_node_is_asked_for_what_its_beats_do_not_show() -> None:
    # Given a node that was granted two actions; when its beats show one of them; then it is asked for the other one, once in three beats
    cluster = Cluster()
    cluster.submit("a", "b")
    for _ in range(3):
        cluster.beat("b")
    assert cluster.broker.orders() == [("tangram.tell", "a")]


@pytest.mark.parametrize("result", [{"status": "succeeded"}, ValueError("no")], ids=["succeeded", "failed"])
def test_what_a_lost_node_had_stored_counts_and_an_environment_that_it_opened_is_lost(result: object) -> None:
    # Given a node that has run an action that may run again, and has opened an environment
    cluster = Cluster()
    cluster.submit("a", idempotent=True)
    cluster.open("e", finish=False)
    # When it is lost with its reports, and the store has both results
    cluster.stored(a=result, **{"open-e": result})
    cluster.lose("n")
    # Then both have ended as their trainers were told, and the environment is gone with its node
    end = ("failed" if isinstance(result, Exception) else "succeeded", True)
    assert cluster.ends() == {"a": end, "open-e": end}
    assert [note.state for note in cluster.of(commands.NoteEnvironment)][-1] == ("closed" if end[0] == "failed" else "lost")
    assert not cluster.waiting and not cluster.core.state.environments


def test_an_environment_that_a_beat_says_has_ended_is_lost_for_the_cause_that_it_names() -> None:
    # Given an environment in which nothing runs; when a beat says that a program has ended it
    cluster = Cluster()
    cluster.open("e")
    cluster.beat(lost=[["e", "its container ended: its memory was full", "out_of_memory"]])
    cluster.exec("late", "e")
    assert cluster.broker.end("late") == ("lost", "out_of_memory")


# A node that comes back


def test_an_environment_that_was_opened_elsewhere_meanwhile_is_closed_where_it_stood() -> None:
    # Given an environment that a node has just opened when it is lost, and that opens on another node
    cluster = Cluster("a")
    cluster.open("e", finish=False)
    cluster.lose("a")
    cluster.beat(node="b")
    assert cluster.granted("open-e") == ("b", 2)
    cluster.beat(node="a", environments=["e"])
    cluster.finish("open-e")
    for name in "baab":
        cluster.beat(node=name, environments=["e"])
    # Then it closes it there, once, and the other keeps it
    assert cluster.ended("a", "b") == [("a", "tangram.close_environment", "e")]
    assert cluster.core.state.environments["e"].node == "b"


def test_a_node_is_asked_ever_more_rarely_to_close_what_it_should_not_hold() -> None:
    cluster = Cluster("a")
    for _ in range(64):
        cluster.beat(node="a", environments=["e"])
    assert cluster.ended("a") == [("a", "tangram.close_environment", "e")] * 6  # at beats 2, 4, 8, 16, 32 and 64


def test_an_action_that_was_moved_is_stopped_where_it_ran_and_not_where_it_runs() -> None:
    # Given an action whose node is lost, and that runs on another node
    cluster = Cluster("a")
    cluster.submit("x", idempotent=True)
    cluster.lose("a")
    cluster.beat(node="b")
    assert cluster.granted("x") == ("b", 2)
    for _ in range(3):
        cluster.beat("x", node="a")
        cluster.beat("x", node="b")
    assert cluster.ended("a", "b") == [("a", "tangram.stop", "x")]


def test_what_a_node_was_granted_anew_when_it_came_back_runs_on() -> None:
    # Given a node that is lost with an action and an environment, and comes back with both
    cluster = Cluster("a", cores=1)
    cluster.submit("x", idempotent=True)
    cluster.open("e", finish=False)
    cluster.lose("a")
    cluster.beat("x", node="a", environments=["e"])
    assert cluster.granted("x") == cluster.granted("open-e") == ("a", 2)
    for _ in range(3):
        cluster.beat("x", "open-e", node="a", environments=["e"])
    # Then nobody touches them, nor what it was granted a moment ago
    cluster.finish("x")
    cluster.submit("y", idempotent=True)
    cluster.beat("open-e", node="a", environments=["e"])
    cluster.beat("open-e", "y", node="a", environments=["e"])
    assert cluster.ended("a") == []


# What the core alone decides of the actions of a lost node


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
