"""A worker that hands over: its node gets nothing more, what runs there goes on, and its successor has the rest."""

from __future__ import annotations

import json

from scheduler.core.nodes import HANDS_OVER
from tangram.wire import GRANT_HEADER, node_queue

from .deployed import BEAT_S
from .test_silent_nodes import LOST, LOST_S, UP, Waiting

SILENT = ("silent", HANDS_OVER)


def sent(cluster: Waiting) -> list[str]:
    """Return what a node has been sent that it has not read, the oldest first: grants by their action, orders by their task."""
    heads = [json.loads(message)["headers"] for message in cluster.broker.waiting(node_queue("n"))]
    return [head["id"] if GRANT_HEADER in head else head["task"] for head in heads]


def test_it_is_let_go_behind_all_that_it_was_granted_and_its_successor_gets_the_rest() -> None:
    # Given a node with two environments, in one of which a command runs and another waits
    cluster = Waiting()
    cluster.open("e")
    cluster.open("f")
    cluster.submit("runs", "next", kind="cpu.exec", environment="e", session="s")
    cluster.send("granted", kind="cpu.exec", environment="f")
    cluster.beat("runs", environments=["e", "f"], leaving=True)
    cluster.submit("late", kind="cpu.exec", environment="f")
    # Then it gets what was granted, and last that this is all
    assert cluster.states() == [UP, SILENT]
    assert sent(cluster)[-2:] == ["granted", "tangram.let_go"]
    cluster.finish("runs", "granted")
    cluster.beat(environments=["e", "f"], leaving=True)
    assert cluster.waiting == ["next", "late"] and not cluster.running
    assert cluster.ends()["runs"] == cluster.ends()["granted"] == ("succeeded", True)
    cluster.beat(environments=["e", "f"], incarnation="2", leaving=False)
    assert cluster.states() == [UP, SILENT, UP] and cluster.running == ["next", "late"]


def test_it_is_not_lost_while_it_waits_for_what_runs_and_is_when_nobody_follows() -> None:
    cluster = Waiting()
    cluster.open("e")
    cluster.exec("x", "e")
    for _ in range(int(2 * LOST_S)):
        cluster.wait(BEAT_S)
        cluster.beat("x", environments=["e"], leaving=True)
    assert cluster.states() == [UP, SILENT] and cluster.running == ["x"]
    cluster.wait(LOST_S + BEAT_S)
    assert cluster.states() == [UP, SILENT, LOST]


def test_what_was_granted_runs_on_and_stops_and_closes_reach_the_worker() -> None:
    # Given a worker that hands over while an environment opens and something runs that may run elsewhere, too
    cluster = Waiting("n")
    cluster.open("e")
    cluster.open("f")
    cluster.exec("x", "e")
    cluster.submit("again", idempotent=True)
    cluster.open("late", finish=False)
    cluster.join("b")
    cluster.beat("x", "again", "open-late", environments=["e", "f"], leaving=True)
    cluster.broker.orders("n")
    cluster.asked({"cancel": {"ids": ["x"]}})
    cluster.close("f", finish=True)
    cluster.finish("again", "open-late")
    # Then all of that counts, and nothing was begun elsewhere
    assert ("n", "tangram.stop", "x") in cluster.ended("n")
    assert [cluster.ends()[name] for name in ("close-f", "again", "open-late")] == [("succeeded", True)] * 3
    assert not cluster.broker.grants("b")


def test_an_open_that_the_next_worker_makes_once_more_is_not_closed_as_a_stranger() -> None:
    # Given a worker that ends while it opens an environment, which the next one has adopted
    cluster = Waiting()
    cluster.open("e")
    cluster.open("half", finish=False)
    cluster.beat("open-half", environments=["e"], leaving=True)
    cluster.asked({"drain": {"node": "n", "draining": True}})
    cluster.beat(environments=["e", "half"], incarnation="2", leaving=False)
    cluster.broker.orders("n")
    for _ in range(4):
        cluster.beat(environments=["e", "half"])
    assert cluster.waiting == ["open-half"] and not cluster.broker.orders("n")
    cluster.asked({"cancel": {"ids": ["open-half"]}})
    for _ in range(2):
        cluster.beat(environments=["e", "half"])
    assert cluster.broker.orders("n") == [("tangram.close_environment", "half")]


def test_a_late_word_of_the_worker_before_changes_nothing() -> None:
    cluster = Waiting()
    cluster.open("e")
    cluster.beat(environments=["e"], incarnation="2")
    cluster.beat(environments=["e"], incarnation="1", leaving=True)
    assert cluster.states() == [UP] and "tangram.let_go" not in sent(cluster)
    cluster.exec("x", "e")
    assert cluster.running == ["x"]
