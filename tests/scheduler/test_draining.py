"""A node that an operator drains: nothing more begins there, what is there comes to its end, and undoing has everything go on."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.cpu.tuning import TUNING
from scheduler.model import QuotaSpec, ServiceSpec, commands, events
from scheduler.policies import PARTS

POLICIES = ["elastic", "paper", "fcfs", "fixed:2", "static:2"]


def drain(w: Any, node: str = "n0", draining: bool = True) -> None:
    w.handle(events.NodeDrained(name=node, draining=draining))


@pytest.mark.parametrize("policy", POLICIES)
def test_what_only_draining_nodes_could_run_waits_and_begins_when_that_is_undone(world: Any, policy: str) -> None:
    w = world(policy, services=["rm"], quotas=[QuotaSpec(name="search")]).node(cells=1)
    drain(w)
    w.open("e", finish=False)
    w.run("build")
    w.submit("nothing", "build")
    w.call("call", "search")
    w.score("score", "rm")
    w.run("large", 9)
    w.tick(1.0)
    assert w.waiting == ["open-e", "build", "nothing", "call", "score"] and not w.grants
    assert list(w.ends) == ["large"] and w.ended("large")[0] == "rejected", "no node could ever run it"
    drain(w, draining=False)
    assert w.waiting == []
    assert set(w.grants) == {"open-e", "build", "nothing", "call", "score"}


@pytest.mark.parametrize("policy", POLICIES)
def test_what_stands_and_runs_on_a_draining_node_comes_to_its_end(world: Any, policy: str) -> None:
    # Given an environment and a running action of a node that is drained then
    w = world(policy).node().open("e")
    w.run("runs")
    drain(w)
    w.exec("first", "e", session="s")
    w.submit("read", "cpu.read_file", environment="e")
    w.exec("second", "e", session="s")
    assert {"runs", "first", "read"} <= set(w.grants)
    w.finish("first")
    w.finish("second")
    w.finish("read")
    w.close("e")
    assert w.grants["close-e"].node == "n0"
    w.finish("close-e")
    w.finish("runs")
    assert {end.status for end in w.ends.values()} == {"succeeded"}
    node = w.core.state.nodes["n0"]
    assert not node.running and not node.environments


def test_a_draining_node_that_is_lost_comes_back_draining_and_its_actions_wait_for_others(world: Any) -> None:
    w = world().node("n0")
    w.run("again", idempotent=True)
    w.open("e", finish=False)
    drain(w)
    # When it is lost and joins again
    w.lose()
    w.node("n0")
    assert w.waiting == ["again", "open-e"]
    assert w.core.state.nodes["n0"].draining
    w.node("n1")
    assert {w.grants["again"].node, w.grants["open-e"].node} == {"n1"}
    # And when it is put back while it is away, it comes back so
    w.lose()
    drain(w, draining=False)
    w.node("n0")
    assert not w.core.state.nodes["n0"].draining


def test_cores_that_were_reserved_on_a_node_are_so_on_another_one_once_that_drains(world: Any) -> None:
    # Given two full nodes, of which one is reserved for a large action that has waited for its turn
    w = world()
    for name in ("n0", "n1"):
        w.node(name, cores=2)
        w.run(f"{name}-a")
        w.run(f"{name}-b")
    w.run("large", 2)
    w.tick(TUNING.turn_after_s + 1.0)
    w.finish("n0-a")
    w.run("other")
    assert w.waiting == ["large", "other"]
    reserved = w.core.state.waiting["large"].reserved_on
    # When that one is drained, and a core of the other one falls free
    assert reserved == "n0"
    drain(w, reserved)
    w.finish("n1-a")
    # Then it is kept until the second one does, too
    assert w.waiting == ["large", "other"]
    w.finish("n1-b")
    assert w.grants["large"].node == "n1"


@pytest.mark.parametrize("without", [[], *([part] for part in PARTS)])
def test_a_service_that_is_resident_on_a_draining_node_alone_is_brought_to_another_one(world: Any, without: list[str]) -> None:
    # Given a service that is resident on a node that is drained, where one of its actions runs
    w = world(services=["rm"], without=without).node("n0", cells=1)
    w.score("a", "rm")
    w.node("n1", cells=1)
    w.score("b", "rm") if "services" in without else None
    drain(w)
    # When another action comes, it does not wait for that instance, idle or not
    w.score("c", "rm")
    w.finish("a")
    w.score("d", "rm")
    started = {start.id: start.grant.node for start in w.of(commands.Start) if start.id in ("c", "d")}
    assert set(started.values()) <= {"n1"}
    for action_id in ("b", "c"):
        if action_id in w.grants:
            w.finish(action_id)
    assert w.grants["d"].node == "n1"


def test_warm_services_are_brought_to_a_node_once_it_drains_no_more(world: Any) -> None:
    w = world(services=[ServiceSpec(name="warm", warm=True)])
    drain(w)
    w.node(cells=1)
    w.tick(1.0)
    assert w.of(commands.Restore) == []
    drain(w, draining=False)
    w.tick(1.0)
    assert [(restore.node, restore.service) for restore in w.of(commands.Restore)] == [("n0", "warm")]
