"""A worker that is started again goes on with the environments that it has adopted; all else that its node held is lost."""

from __future__ import annotations

import json

import pytest

from scheduler.live.entries import NodeChanged
from scheduler.live.incarnations import REMEMBERED_S
from scheduler.model import commands
from tangram.wire import GRANT_HEADER, node_queue

from .test_silent_nodes import BEAT_S, UP, Waiting

RESTARTED = ("lost", "its worker was restarted")


def test_an_adopted_environment_goes_on_and_all_else_of_its_node_is_lost_at_once() -> None:
    # Given a node with two environments, and in each a session in which a command runs and another waits
    cluster = Waiting()
    for name in ("kept", "gone"):
        cluster.open(name)
        cluster.submit(f"runs-{name}", f"next-{name}", kind="cpu.exec", environment=name, session="s")
    cluster.submit("again", idempotent=True)
    cluster.submit("once")
    cluster.beat(environments=["kept"], incarnation="2")
    # Then what ran is lost, in the adopted one without this, and what waits there runs
    assert cluster.states() == [UP]
    assert cluster.broker.end("runs-kept") == cluster.broker.end("once") == ("lost", "node_lost")
    assert cluster.broker.end("runs-gone") == cluster.broker.end("next-gone") == ("lost", "environment_lost")
    assert sorted(cluster.running) == ["again", "next-kept"] and cluster.granted("again") == ("n", 2)
    assert list(cluster.core.state.environments) == ["kept"]
    # And its grants, and the journal, name the new worker
    sent = [json.loads(message)["headers"] for message in cluster.broker.waiting(node_queue("n"))]
    assert [one[GRANT_HEADER]["incarnation"] for one in sent if one["id"] == "next-kept"] == ["2"]
    changed = [entry for entry in cluster.journal.entries if isinstance(entry, NodeChanged)]
    assert [entry.description["incarnation"] for entry in changed] == ["1", "2"]
    cluster.finish("next-kept")
    cluster.close("kept", finish=True)
    assert cluster.ends()["close-kept"] == ("succeeded", True) and not cluster.core.state.environments


@pytest.mark.parametrize("adopted", [["kept"], []])
def test_what_runs_in_an_environment_that_is_not_adopted_ends_with_the_reason(adopted: list[str]) -> None:
    cluster = Waiting()
    for name in ("kept", "gone", "worn"):
        cluster.open(name)
        cluster.exec(f"runs-{name}", name)
    cluster.submit("once")
    # When the next worker cannot go on with two of them, and names one more of another scheduler
    why = {"other": "what is known of it", "gone": "its memory has format 9", "worn": "it has no record"}
    cluster.beat(environments=adopted, incarnation="2", lost=[(name, reason, "environment_lost") for name, reason in why.items()])
    # Then the ends of what was there say so, each with the reason of its own environment
    ends = {end.id: end for end in cluster.of(commands.Finish)}
    restarted = "node n was lost: its worker was restarted"
    for name in ("gone", "worn"):
        reason = f"{restarted}, and could not go on with environment {name}: {why[name]}"
        assert (ends[f"runs-{name}"].reason, ends[f"runs-{name}"].cause) == (reason, "environment_lost")
    assert ends["once"].reason == restarted


@pytest.mark.parametrize("left", [False, True], ids=["replaced", "left"])
@pytest.mark.parametrize("kind", ["beat", "left"])
def test_what_a_worker_has_said_says_nothing_of_its_node_once_another_one_is_there(left: bool, kind: str) -> None:
    # Given a node whose worker has gone, and the next one, which runs a command
    cluster = Waiting()
    before = dict(cluster.nodes["n"])
    if left:
        cluster.told({"type": "left", "name": "n", "incarnation": "1"})
    cluster.beat(incarnation="2")
    cluster.open("e")
    cluster.exec("x", "e")
    states = cluster.states()
    # When a report of the worker before comes late, since a replaced scheduler had taken it, then the node stays
    cluster.told({"type": "left", "name": "n", "incarnation": "1"} if kind == "left" else {"type": "beat", "node": before})
    assert cluster.states() == states and cluster.running == ["x"] and list(cluster.core.state.environments) == ["e"]
    # And it goes when its own worker leaves
    cluster.told({"type": "left", "name": "n", "incarnation": "2"})
    assert cluster.states()[-1] == ("left", "its worker was stopped")


def test_a_worker_that_was_taken_for_an_earlier_one_is_believed_once_it_goes_on() -> None:
    # Given a scheduler that knows of the next worker, when a late beat of the one before has it take the two for each other
    cluster = Waiting()
    cluster.beat(incarnation="0")
    # Then the worker that beats on has the node again
    until = cluster.now + REMEMBERED_S + BEAT_S
    while cluster.now < until:
        cluster.wait(BEAT_S)
        cluster.beat(incarnation="1")
    cluster.open("e")
    cluster.exec("x", "e")
    assert cluster.running == ["x"]


def test_an_environment_that_is_being_closed_is_closed_by_the_next_worker() -> None:
    # Given a node that closes an environment, and another one; when its next worker has both
    cluster = Waiting()
    cluster.open("e")
    cluster.open("f")
    cluster.close("e")
    cluster.beat(environments=["e", "f"], incarnation="2")
    # Then nobody knows how far that came, and the node is asked to close what it should not have
    assert cluster.ends()["close-e"] == ("lost", False)
    cluster.beat(environments=["e", "f"])
    assert cluster.ended("n") == [("n", "tangram.close_environment", "e")]
    cluster.beat(environments=["f"])
    assert list(cluster.core.state.environments) == ["f"]


@pytest.mark.parametrize("stored", [False, True])
def test_an_open_whose_worker_was_restarted_counts_if_its_result_is_stored(stored: bool) -> None:
    # Given two environments, of which one is being opened; when the next worker has both
    cluster = Waiting()
    cluster.open("e")
    cluster.open("f", finish=False)
    if stored:
        cluster.stored(**{"open-f": None})
    cluster.beat(environments=["e", "f"], incarnation="2")
    # Then it is open where its trainer was told so, and else opened once more, which finds it
    assert [start.grant.attempt for start in cluster.of(commands.Start) if start.id == "open-f"] == ([1] if stored else [1, 2])
    assert cluster.core.state.environments["f"].state == ("open" if stored else "opening")


def test_a_worker_that_offers_something_else_goes_on_with_nothing() -> None:
    cluster = Waiting()
    cluster.open("e")
    cluster.beat(environments=["e"], incarnation="2", cores=4)
    assert cluster.states() == [UP, RESTARTED, UP] and not cluster.core.state.environments


def test_nothing_is_given_up_before_the_store_says_what_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.broker.transport._LONGEST_PAUSE_S", 0.0)
    # Given an environment with a command, and a result store that is away; when another worker has adopted the environment
    cluster = Waiting()
    cluster.open("e")
    cluster.exec("x", "e")
    cluster.away()
    cluster.beat(environments=["e"], incarnation="2")
    assert cluster.running == ["x"]
    # And the store is back, which has the result of the command; then that counts
    cluster.back()
    cluster.stored(x={"status": "succeeded"})
    cluster.beat(environments=["e"])
    assert cluster.ends()["x"] == ("succeeded", True) and list(cluster.core.state.environments) == ["e"]
