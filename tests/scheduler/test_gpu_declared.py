"""Nodes that declare different services, or others than before, and restores that nobody hears of any more."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.live.entries import NodeChanged, Unfinished
from scheduler.live.instances import RESTORE_UNSEEN_S
from scheduler.model import ServiceSpec, events
from scheduler.model.commands import Restore, Start

from .deployed import NODE, Deployment


@pytest.mark.parametrize("policy", ["elastic", "paper", "static:1"])
def test_an_action_goes_where_its_service_is_declared(world: Any, policy: str) -> None:
    w = world(policy, services=["rm", "judge"]).node("a", cells=2, services=frozenset({"rm"}))
    w.node("b", cells=2, services=frozenset({"judge"}))
    for one in ("j1", "j2"):
        w.score(one, "judge")
    w.score("r", "rm")
    nodes = {name: grant.node for name, grant in w.grants.items()}
    assert nodes.get("r") == "a"
    assert {nodes[one] for one in ("j1", "j2") if one in nodes} == {"b"}
    # And it stays there when that is declared once more
    w.handle(events.ServicesDeclared(node="a", services=frozenset({"rm"})))
    w.finish("r")
    w.score("again", "rm")
    assert (w.grants["again"].node, w.grants["again"].restore) == ("a", False)


def test_what_no_node_that_is_up_declares_is_rejected_at_once(world: Any) -> None:
    w = world(services=["rm", "judge"]).node(cells=1, services=frozenset({"rm"}))
    w.score("j", "judge")
    assert w.ended("j") == ("rejected", "no node that is up declares service 'judge'")


def test_who_waits_for_a_service_that_is_declared_no_longer_is_told(world: Any) -> None:
    w = world(services=["rm", "judge"]).node(cells=1, services=frozenset({"rm", "judge"}))
    w.score("r", "rm")
    w.score("r2", "rm", idempotent=True)
    w.score("j", "judge")
    w.handle(events.ServicesDeclared(node="n0", services=frozenset({"rm"})))
    assert w.ended("j") == ("rejected", "no node declares service 'judge' any more")
    assert w.waiting == ["r2"]
    w.finish("r")
    assert "r2" in w.grants
    # And who was at work on a service that has gone meanwhile does not wait for it either
    w.handle(events.ServicesDeclared(node="n0", services=frozenset()))
    w.handle(events.NodeLost(name="n0", reason="dead"))
    assert w.ended("r2") == ("rejected", "no node declares service 'rm' any more")


def test_a_worker_that_comes_back_without_a_service_ends_who_waited_for_it(world: Any) -> None:
    # Given two nodes that are away, and actions that wait for them
    w = world(services=["rm", "judge"]).node("a", cells=1, services=frozenset({"rm"}))
    w.node("b", cells=1, services=frozenset({"judge"}))
    for node in ("a", "b"):
        w.handle(events.NodeLost(name=node, reason="its worker was stopped", left=True))
    w.score("r", "rm")
    w.score("j", "judge")
    # When one comes back with another file, then what it declares no longer is not waited for, and the other one still is
    w.node("a", cells=1, services=frozenset())
    assert w.ended("r") == ("rejected", "no node declares service 'rm' any more")
    assert w.waiting == ["j"]


def test_a_service_that_becomes_warm_is_brought(world: Any) -> None:
    w = world(services=["rm"]).node(cells=2, services=frozenset({"rm"}))
    w.core.state.services["hot"] = ServiceSpec(name="hot", restore_s=0.5, warm=True)
    w.handle(events.ServicesDeclared(node="n0", services=frozenset({"rm", "hot"})))
    w.tick()
    assert w.of(Restore) == [Restore(node="n0", service="hot", cell_ids=(0,))]


def test_an_instance_is_as_its_service_is_declared_now(world: Any) -> None:
    # Given an instance at work on the only cell, of a service that runs one action at a time
    w = world(services=["rm"]).node(cells=1, services=frozenset({"rm"}))
    w.score("a", "rm")
    w.score("b", "rm")
    assert w.waiting == ["b"]
    # When it is declared to run two, and to stay
    w.core.state.services["rm"] = ServiceSpec(name="rm", restore_s=0.5, max_concurrency=2, pinned=True)
    w.handle(events.ServicesDeclared(node="n0", services=frozenset({"rm"})))
    assert w.grants["b"].cell_ids == w.grants["a"].cell_ids
    assert [one.pinned for one in w.core.pools.gpu.groups["n0"].instances] == [True]


class Gpu(Deployment):
    """A scheduler that knows of a node with a warm service, from its join or from the journal of the scheduler before."""

    def __init__(self, policy: str = "elastic", *, resumed: bool = False, **spec: Any) -> None:
        super().__init__()
        described = {"kinds": ["gpu"], "cores": 0, "cells": 1, "services": {"hot": {"warm": True}}, "instances": [], **spec}
        if resumed:
            self.nodes["n"] = {**NODE, **described}
            known = NodeChanged(name="n", state="up", description=self.nodes["n"], at=0.0)
            self.journal.left = Unfinished(actions=[], environments=[], nodes=[known])
        self.start(policy)
        if not resumed:
            self.join(**described)
        self.wait(0.5)

    def restoring(self) -> list[bool]:
        return [instance.restoring for instance in self.core.pools.gpu.groups["n"].instances]


def hot(state: str, *cell_ids: Any) -> dict[str, Any]:
    return {"service": "hot", "cell_ids": list(cell_ids or [0]), "state": state, "reason": ""}


@pytest.mark.parametrize(
    ("said", "restores"),
    [([hot("resident", 0)], []), ([hot("starting", 1)], []), ([], [("tangram.restore", "hot")])],
    ids=["there", "on its way to other cells", "not there"],
)
def test_a_restarted_scheduler_hears_what_is_there_before_it_brings_warm_services(said: list[Any], restores: list[Any]) -> None:
    # Given a node that an earlier scheduler knew, of which nothing is heard yet
    gpu = Gpu(resumed=True, cells=2)
    assert gpu.broker.orders() == []
    gpu.beat(instances=said)
    assert (gpu.broker.orders(), any(gpu.restoring())) == (restores, said != [hot("resident")])


@pytest.mark.parametrize("policy", ["elastic", "paper"])
@pytest.mark.parametrize("changed", [False, True])
def test_a_restarted_scheduler_grants_no_cells_before_it_knows_what_is_on_them(policy: str, changed: bool) -> None:
    # Given a node of an earlier scheduler, of which nothing is heard yet, and an action for what is there
    gpu = Gpu(policy, resumed=True)
    gpu.submit("a", kind="gpu.score", service="hot", cost={"cells": 1})
    gpu.wait(0.5)
    assert not gpu.of(Start)
    # When its first beat says what is there, next to what makes no sense; then it starts at once, and nothing is brought
    services = {"services": {"hot": {"warm": True, "restore_s": 3.0}}} if changed else {}
    gpu.beat(instances=[hot("resident", "x"), hot("resident")], **services)
    assert [(one.id, one.grant.cell_ids, one.grant.restore) for one in gpu.of(Start)] == [("a", (0,), False)]


def test_a_restore_of_which_beats_show_nothing_gives_its_cells_back() -> None:
    # Given a restore that was ordered, of which the node knows nothing
    gpu = Gpu()
    assert gpu.restoring() == [True]
    # When it is under way, it may take as long as it does; when nothing is seen of it for long, its cells are free
    gpu.now += RESTORE_UNSEEN_S
    gpu.beat(instances=[hot("starting")])
    assert gpu.restoring() == [True]
    gpu.beat(instances=[])
    assert gpu.restoring() == []


def test_a_beat_that_shows_a_restored_instance_ends_its_restore() -> None:
    # Given a restore of what had been resident before, as far as was said
    gpu = Gpu()
    gpu.told({"type": "service", "node": "n", **hot("resident")})
    gpu.core.pools.gpu.groups["n"].instances[0].restoring = True
    gpu.beat(instances=[hot("resident")])
    assert gpu.restoring() == [False]


def test_nodes_that_declare_a_service_differently_are_spoken_of(caplog: pytest.LogCaptureFixture) -> None:
    gpu = Gpu(services={"rm": {"memory_mb": 500}})
    gpu.beat(node="m", kinds=["gpu"], services={"rm": {"memory_mb": 900}})
    assert "node m declares service rm otherwise than node n does" in caplog.text
