"""Nodes that declare different services, or others than before, and restores that nobody hears of any more."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.live.heartbeats import RESTORE_UNSEEN_S
from scheduler.model import ServiceSpec, events
from scheduler.model.commands import Restore, Start
from tangram.action import Action, Cost

from .driver import Driver

RM = ServiceSpec(name="rm", restore_s=0.5)
JUDGE = ServiceSpec(name="judge", restore_s=0.5)


@pytest.mark.parametrize("policy", ["elastic", "paper", "static:1"])
def test_an_action_goes_where_its_service_is_declared(world: Any, policy: str) -> None:
    w = world(policy, services=[RM, JUDGE]).node("a", cells=2, services=frozenset({"rm"}))
    w.node("b", cells=2, services=frozenset({"judge"}))

    for one in ("j1", "j2"):
        w.score(one, "judge")
    w.score("r", "rm")

    nodes = {name: grant.node for name, grant in w.grants.items()}
    assert nodes.get("r") == "a"
    assert {nodes[one] for one in ("j1", "j2") if one in nodes} == {"b"}


def test_what_no_node_that_is_up_declares_is_rejected_at_once(world: Any) -> None:
    w = world(services=[RM, JUDGE]).node(cells=1, services=frozenset({"rm"}))

    w.score("j", "judge")

    assert w.ended("j") == ("rejected", "no node that is up declares service 'judge'")


def test_who_waits_for_a_service_that_is_declared_no_longer_is_told(world: Any) -> None:
    # Given one action on the only cell and two that wait
    w = world(services=[RM, JUDGE]).node(cells=1, services=frozenset({"rm", "judge"}))
    w.score("r", "rm")
    w.score("r2", "rm", idempotent=True)
    w.score("j", "judge")

    # When the judge is taken out of the file
    w.handle(events.ServicesDeclared(node="n0", services=frozenset({"rm"})))

    # Then who waits for it ends, and others go on
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
    w = world(services=[RM, JUDGE]).node("a", cells=1, services=frozenset({"rm"}))
    w.node("b", cells=1, services=frozenset({"judge"}))
    for node in ("a", "b"):
        w.handle(events.NodeLost(name=node, reason="its worker was stopped", left=True))
    w.score("r", "rm")
    w.score("j", "judge")

    # When one comes back with another file, then what it declares no longer is not waited for, and the other one still is
    w.node("a", cells=1, services=frozenset())

    assert w.ended("r") == ("rejected", "no node declares service 'rm' any more")
    assert w.waiting == ["j"]


def test_an_instance_of_a_service_that_is_gone_gives_its_cells_back(world: Any) -> None:
    w = world(services=[RM, ServiceSpec(name="old", restore_s=0.5, pinned=True)])
    w.node(cells=1, services=frozenset({"rm", "old"}))
    w.report("old", (0,), "resident")
    w.handle(events.ServicesDeclared(node="n0", services=frozenset({"rm"})))
    w.score("r", "rm")

    w.report("old", (0,), "absent")

    assert w.evicted("r") == []


def test_a_service_stays_known_while_another_node_declares_it(world: Any) -> None:
    w = world(services=[RM]).node("a", cells=1, services=frozenset({"rm"})).node("b", cells=1, services=frozenset({"rm"}))

    w.handle(events.ServicesDeclared(node="a"))
    w.score("r", "rm")

    assert w.grants["r"].node == "b"


def test_a_service_that_becomes_warm_is_brought(world: Any) -> None:
    w = world(services=[RM]).node(cells=2, services=frozenset({"rm"}))
    w.core.state.services["hot"] = ServiceSpec(name="hot", restore_s=0.5, warm=True)

    w.handle(events.ServicesDeclared(node="n0", services=frozenset({"rm", "hot"})))
    w.tick()

    assert w.of(Restore) == [Restore(node="n0", service="hot", cell_ids=(0,))]


def test_an_instance_is_as_its_service_is_declared_now(world: Any) -> None:
    # Given an instance at work on the only cell, of a service that runs one action at a time
    w = world(services=[RM]).node(cells=1, services=frozenset({"rm"}))
    w.score("a", "rm")
    w.score("b", "rm")
    assert w.waiting == ["b"]

    # When it is declared to run two, and to stay
    w.core.state.services["rm"] = ServiceSpec(name="rm", restore_s=0.5, max_concurrency=2, pinned=True)
    w.handle(events.ServicesDeclared(node="n0", services=frozenset({"rm"})))

    assert w.grants["b"].cell_ids == w.grants["a"].cell_ids
    assert [one.pinned for one in w.core.pools.gpu.groups["n0"].instances] == [True]


class Beaten(Driver):
    """A driver that hears the beats of one node."""

    def described(self, *instances: dict[str, Any], **services: Any) -> dict[str, Any]:
        node = {"name": "n", "incarnation": "i", "kinds": ["gpu"], "labels": [], "cores": 0, "memory_mb": 0, "cells": 1}
        services = services or {"hot": {"warm": True}}
        return {**node, "cell_memory_mb": 0, "running": [], "environments": [], "services": services, "instances": list(instances)}

    def restores(self) -> list[str]:
        return [service for task, service in self.wires.controls if task == "tangram.restore"]

    def restoring(self) -> list[bool]:
        return [instance.restoring for instance in self.core.pools.gpu.groups["n"].instances]


def hot(state: str) -> dict[str, Any]:
    return {"service": "hot", "cell_ids": [0], "state": state, "reason": ""}


@pytest.fixture
def driver() -> Beaten:
    return Beaten()


def test_a_restarted_scheduler_hears_what_is_there_before_it_brings_warm_services(driver: Beaten) -> None:
    # Given a node that an earlier scheduler knew, of which nothing is heard yet
    driver.heartbeats.resume("n", driver.described(), 0.0)
    driver.handle(events.Tick(), 0.1)
    assert driver.restores() == []

    # When it says that its warm service is there, then it is not brought once more
    driver.heartbeats.take_beat(driver.described(hot("resident")), 1.0)
    driver.handle(events.Tick(), 1.1)
    assert driver.restores() == []

    # And where it is on its way to other cells than it would be brought onto, it is waited for
    third = Beaten()
    third.heartbeats.resume("n", {**third.described(), "cells": 2}, 0.0)
    third.heartbeats.take_beat(third.described({**hot("starting"), "cell_ids": [1]}), 1.0)
    third.handle(events.Tick(), 1.1)
    assert (third.restores(), third.restoring()) == ([], [True])

    # And where it is not there, it is brought
    other = Beaten()
    other.heartbeats.resume("n", other.described(), 0.0)
    other.heartbeats.take_beat(other.described(), 1.0)
    other.handle(events.Tick(), 1.1)
    assert other.restores() == ["hot"]


@pytest.mark.parametrize("policy", ["elastic", "paper"])
@pytest.mark.parametrize("changed", [False, True])
def test_a_restarted_scheduler_grants_no_cells_before_it_knows_what_is_on_them(policy: str, changed: bool) -> None:
    # Given a node of an earlier scheduler, of which nothing is heard yet, and an action for what is there
    driver = Beaten(policy=policy)
    driver.heartbeats.resume("n", driver.described(), 0.0)
    action = Action(kind="gpu.score", service="hot", cost=Cost({"cells": (1,)}))
    driver.executor.keep("a", "message", 0.0)
    driver.handle(events.Submitted(id="a", action=action, submitted_at=0.0), 0.0)
    driver.handle(events.Tick(), 0.5)
    assert not [one for one in driver.out if isinstance(one, Start)]
    # When its first beat says what is there, next to what makes no sense; then it starts at once, and nothing is brought
    services = {"hot": {"warm": True, "restore_s": 3.0}} if changed else {}
    driver.heartbeats.take_beat(driver.described({**hot("resident"), "cell_ids": ["x"]}, hot("resident"), **services), 1.0)
    assert [(one.id, one.grant.cell_ids, one.grant.restore) for one in driver.out if isinstance(one, Start)] == [("a", (0,), False)]


def test_a_restore_of_which_beats_show_nothing_gives_its_cells_back(driver: Beaten) -> None:
    # Given a restore that was ordered, of which the node knows nothing
    driver.heartbeats.take_beat(driver.described(), 0.0)
    driver.handle(events.Tick(), 0.1)
    assert driver.restoring() == [True]

    # When it is under way, it may take as long as it does; when nothing is seen of it for long, its cells are free
    driver.heartbeats.take_beat(driver.described(hot("starting")), RESTORE_UNSEEN_S + 1.0)
    assert driver.restoring() == [True]
    driver.heartbeats.take_beat(driver.described(), RESTORE_UNSEEN_S + 2.0)

    assert driver.restoring() == []


def test_a_beat_that_shows_a_restored_instance_ends_its_restore(driver: Beaten) -> None:
    # Given a restore of what had been resident before, as far as was said
    driver.heartbeats.take_beat(driver.described(), 0.0)
    driver.heartbeats.instances.changed("n", hot("resident"), 0.05)
    driver.core.pools.gpu.groups["n"].instances[0].restoring = True

    driver.heartbeats.take_beat(driver.described(hot("resident")), 2.0)

    assert driver.restoring() == [False]


def test_nodes_that_declare_a_service_differently_are_spoken_of(driver: Beaten, caplog: pytest.LogCaptureFixture) -> None:
    driver.heartbeats.take_beat(driver.described(rm={"memory_mb": 500}), 0.0)
    driver.heartbeats.take_beat({**driver.described(rm={"memory_mb": 900}), "name": "m"}, 0.0)

    assert "node m declares service rm otherwise than node n does" in caplog.text


def test_a_worker_that_says_nothing_of_instances_is_taken_in(driver: Beaten) -> None:
    described = driver.described(rm={})
    del described["instances"]

    driver.heartbeats.take_beat(described, 0.0)
    driver.heartbeats.take_beat(described, 2.0)

    assert "n" in driver.core.state.nodes
