"""A node that is silent: what may run elsewhere does so at once, all else waits for the node until it is lost."""

from __future__ import annotations

from typing import Any

import pytest

from app.broker.transport import KombuTransport
from scheduler.model import ServiceSpec, commands, events
from tangram.wire import CLAIM_KEY_PREFIX

from .deployed import BEAT_S, Cluster

LOST_S = 60.0
UP, SILENT, LOST = ("up", ""), ("silent", "3 beats missed"), ("lost", "no beat for 60 s")
IDLE = ("silent", "it beats but does not run what it was handed")
POLICIES = ["elastic", "paper", "fcfs", "fixed:2", "static:2"]


class Waiting(Cluster):
    """A cluster that waits for its silent nodes."""

    def __init__(self, *names: str, **spec: Any) -> None:
        super().__init__(*names, node_lost_s=LOST_S, **spec)

    def silence(self, seconds: float = 4.0, *others: str) -> None:
        """Let nodes be silent for so many seconds, in which `others` beat."""
        until = self.now + seconds
        while self.now < until:
            if not others:
                self.wait(BEAT_S)
            for name in others:
                running = [one.waiting.id for one in self.core.state.running.values() if one.grant.node == name]
                self.now -= BEAT_S * (name != others[0])
                self.beat(*running, node=name, environments=list(self.core.state.nodes[name].environments))

    @property
    def disowned(self) -> list[str]:
        return [key.removeprefix(CLAIM_KEY_PREFIX) for key in self.broker.keys(CLAIM_KEY_PREFIX)]


def test_a_node_is_silent_after_three_beats_and_lost_after_its_time() -> None:
    cluster = Waiting()
    cluster.open("e")
    cluster.exec("x", "e")
    cluster.wait(3.5)
    assert cluster.states() == [UP, SILENT]
    cluster.wait(LOST_S - 3.5)
    assert cluster.states() == [UP, SILENT] and cluster.running == ["x"]
    cluster.wait(0.5)
    assert cluster.states() == [UP, SILENT, LOST]
    assert cluster.broker.end("x") == ("lost", "environment_lost")


def test_a_clock_that_is_set_back_hides_neither_silence_nor_beats_and_ends_no_housekeeping() -> None:
    # Given an environment; when the scheduler's clock is set back by a minute
    cluster = Waiting()
    cluster.open("e")
    cluster.now -= 60.0
    looks = cluster.looks
    cluster.wait(BEAT_S)
    assert cluster.looks > looks, "the lease is prolonged"
    # Then beats count in full: an environment that they do not name any more is lost
    cluster.beat()
    cluster.beat()
    assert not cluster.core.state.environments
    # And a node without beats is silent
    cluster.silence()
    assert cluster.states() == [UP, SILENT]


def test_a_node_of_which_nothing_is_heard_since_a_clock_was_set_back_is_silent() -> None:
    cluster = Waiting()
    cluster.now -= 60.0
    cluster.silence(5.0)
    assert cluster.states() == [UP, SILENT]


def test_a_node_that_beats_and_takes_up_nothing_is_silent_until_it_does_or_its_time_is_over() -> None:
    # Given a node that was cut off: it beats again, but what it was handed does not reach it yet
    cluster = Waiting("a")
    cluster.open("e")
    cluster.exec("x", "e")

    def beat(*running: str, for_s: float) -> None:
        until = cluster.now + for_s
        while cluster.now < until:
            cluster.beat(*running, node="a", environments=["e"])

    # When it has beaten three times and once more, then it is silent, and nothing is lost
    beat(for_s=4.0)
    assert cluster.states()[-1] == IDLE and cluster.running == ["x"]
    beat("x", for_s=1.0)
    assert cluster.states()[-1] == UP
    # And it is lost when it has taken up nothing for its time
    cluster.exec("y", "e")
    beat("x", for_s=LOST_S - 1.0)
    assert cluster.states()[-1] == IDLE
    beat("x", for_s=3.0)
    assert ("lost", IDLE[1]) in cluster.states() and cluster.broker.end("x") == ("lost", "environment_lost")


def test_what_may_run_elsewhere_is_given_up_at_once_and_all_else_goes_on_with_its_node() -> None:
    # Given a node with what may run again, what may not, and an environment with a command that may
    cluster = Waiting("a")
    cluster.open("e")
    cluster.submit("again", idempotent=True)
    cluster.submit("once")
    cluster.submit("within", kind="cpu.exec", environment="e", idempotent=True)
    cluster.beat("again", "once", "within", node="a", environments=["e"])
    # When the node is silent, and another one is there
    cluster.join("b")
    cluster.silence(4.0, "b")
    # Then only the first runs there, and its earlier try stores nothing any more
    assert cluster.granted("again") == ("b", 2) and cluster.disowned == ["again:1"]
    assert cluster.granted("once") == ("a", 1) and cluster.granted("within") == ("a", 1)
    # And when the first node beats again, what has waited ends by its own results, once
    cluster.silence(20.0, "b")
    cluster.beat("again", "once", "within", node="a", environments=["e"])
    cluster.finish("once", "within")
    assert cluster.states() == [UP, UP, SILENT, UP]
    assert cluster.ends()["once"] == cluster.ends()["within"] == ("succeeded", True)
    assert [start.id for start in cluster.of(commands.Start)] == ["open-e", "again", "once", "within", "again"]
    # And it is asked to stop what runs elsewhere by now
    cluster.beat("again", node="a", environments=["e"])
    cluster.beat("again", node="a", environments=["e"])
    assert cluster.ended("a") == [("a", "tangram.stop", "again")]


def test_a_result_that_a_silent_node_has_stored_counts() -> None:
    # Given two actions that may run again, and an environment that opens, of which the store has results
    cluster = Waiting("a")
    cluster.submit("done", "cut", idempotent=True)
    cluster.open("e", finish=False)
    cluster.stored(done=1, **{"open-e": None})
    cluster.join("b")
    cluster.silence(4.0, "b")
    # Then these have ended, the environment stands where it was opened, and the rest runs elsewhere
    assert cluster.ends() == {"done": ("succeeded", True), "open-e": ("succeeded", True)}
    assert cluster.core.state.environments["e"].node == "a" and cluster.core.state.environments["e"].state == "open"
    assert cluster.granted("cut") == ("b", 2)


def test_an_environment_that_a_silent_node_was_opening_opens_elsewhere_and_frees_its_room() -> None:
    # Given a node whose memory is taken by an environment that it opens, with a command that waits for it
    cluster = Waiting("a")
    cluster.open("e", finish=False, memory_mb=1000)
    cluster.exec("x", "e")
    # When it is silent, then another node opens the environment
    cluster.join("b")
    cluster.silence(4.0, "b")
    assert cluster.granted("open-e") == ("b", 2)
    cluster.finish("open-e")
    assert cluster.granted("x") == ("b", 1)
    # And when the first beats again, its memory is free, and what it still holds of the environment is closed
    cluster.beat(node="a", environments=["e"])
    cluster.beat(node="a", environments=["e"])
    cluster.open("f", memory_mb=1000)
    assert cluster.core.state.environments["f"].node == "a"
    assert ("a", "tangram.close_environment", "e") in cluster.ended("a")


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_begins_on_a_silent_node_until_it_beats_again(policy: str) -> None:
    # Given a node with an environment whose cores are all taken, and a command that waits for them
    cluster = Waiting(policy=policy, cores=2)
    cluster.open("e")
    cluster.submit("runs", kind="cpu.exec", environment="e", cost={"cores": 2}, preemptible=False)
    cluster.submit("queued", kind="cpu.exec", environment="e", cost={"cores": 2}, preemptible=False)
    cluster.silence()
    # When its cores fall free while it is silent, and more comes for it
    cluster.finish("runs")
    cluster.submit("later", kind="cpu.exec", environment="e")
    cluster.submit("read", kind="cpu.read_file", environment="e", cost={})
    cluster.submit("anywhere", "nothing", cost={})
    cluster.open("f")
    cluster.silence(10.0)
    # Then all of it waits, and begins once the node beats again
    assert cluster.waiting == ["queued", "later", "read", "anywhere", "nothing", "open-f"] and not cluster.running
    cluster.beat(environments=["e"])
    assert "queued" in cluster.running and "read" in cluster.running and "nothing" in cluster.running
    cluster.finish("queued")
    assert "later" in cluster.running


def test_commands_of_one_session_keep_their_order_while_their_node_is_silent() -> None:
    # Given commands of a session, of which one runs on a silent node and one is cancelled there
    cluster = Waiting()
    cluster.open("e")
    for name in ("one", "two", "three", "four"):
        cluster.submit(name, kind="cpu.exec", environment="e", session="s")
    cluster.silence()
    cluster.asked({"cancel": {"ids": ["two"]}})
    cluster.finish("one")
    assert cluster.waiting == ["three", "four"]
    cluster.beat(environments=["e"])
    assert cluster.running == ["three"]
    cluster.finish("three")
    assert cluster.running == ["four"]


def test_stops_and_closes_go_to_a_silent_node_and_again_when_it_beats() -> None:
    # Given a silent node with two environments, one with a command
    cluster = Waiting()
    cluster.open("e")
    cluster.open("f")
    cluster.exec("x", "e")
    cluster.silence()
    cluster.broker.orders("n")
    cluster.asked({"cancel": {"ids": ["x"]}})
    cluster.close("f")
    assert cluster.broker.grants() == [("close-f", 1)]
    assert ("n", "tangram.stop", "x") in cluster.ended("n")
    # And the node, which has missed the stop, beats again, then it is told once more
    cluster.beat("x", "close-f", environments=["e", "f"])
    cluster.beat("x", "close-f", environments=["e", "f"])
    assert cluster.ended("n") == [("n", "tangram.stop", "x")]


@pytest.mark.parametrize("left", [False, True])
def test_a_silent_node_whose_worker_is_another_one_or_leaves_is_lost_at_once(left: bool) -> None:
    cluster = Waiting()
    cluster.open("e")
    cluster.silence()
    if left:
        cluster.told({"type": "left", "name": "n"})
    else:
        cluster.beat(incarnation="2")
    reason = ("left", "its worker was stopped") if left else ("lost", "its worker was restarted")
    assert cluster.states()[:3] == [UP, SILENT, reason]
    assert not cluster.core.state.environments


def test_what_a_silent_node_runs_is_given_up_once_the_store_says_what_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.broker.transport._LONGEST_PAUSE_S", 0.0)
    cluster = Waiting()
    cluster.submit("x", idempotent=True)
    cluster.away()
    cluster.silence(10.0)
    assert cluster.states() == [UP] and cluster.running == ["x"]
    cluster.back()
    cluster.silence(10.0)
    assert cluster.states() == [UP, SILENT] and cluster.waiting == ["x"]


def test_a_scheduler_that_could_not_hear_gives_silent_nodes_their_time_anew_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a silent node; when its scheduler cannot hear beats for long
    cluster = Waiting()
    cluster.open("e")
    cluster.silence(30.0)
    monkeypatch.setattr(KombuTransport, "caught_up", False)
    cluster.silence(100.0)
    monkeypatch.setattr(KombuTransport, "caught_up", True)
    # Then it stays silent, and is lost once it has not beaten for its time since
    cluster.submit("x", idempotent=True)
    cluster.silence(LOST_S - 1.0)
    assert cluster.states() == [UP, SILENT] and cluster.waiting == ["x"]
    cluster.silence(2.0)
    assert cluster.states() == [UP, SILENT, LOST]


def test_calls_of_a_silent_gpu_node_go_elsewhere_and_it_takes_some_again_once_it_beats(world: Any) -> None:
    # Given a service with two calls on the cell of a node, of which one may be repeated; when the node is silent
    w = world("elastic", services=[ServiceSpec(name="rm", max_concurrency=2)]).node("n0", cells=1)
    w.score("once", "rm")
    w.score("again", "rm", idempotent=True)
    w.handle(events.NodeSilent(name="n0", reason="quiet"))
    w.score("new", "rm")
    # Then the other one and what comes later wait for another node, and run there
    assert w.waiting == ["again", "new"] and w.grants["once"].node == "n0"
    w.node("n1", cells=1)
    assert w.grants["again"].node == w.grants["new"].node == "n1"
    w.score("more", "rm")
    assert w.waiting == ["more"]
    w.handle(events.NodeBeat(name="n0", running=frozenset({"once"})))
    assert w.grants["more"].node == "n0"
