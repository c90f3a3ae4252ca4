"""What no node can ever serve: it is refused at once, or, where pinned services are in the way, waits without keeping others waiting."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.gpu.tuning import TUNING
from scheduler.model import ServiceSpec

PINNED = ServiceSpec(name="pinned", restore_s=0.5, max_concurrency=2, pinned=True)
WIDE = ServiceSpec(name="wide", cells=(2,), restore_s=0.5)
POLICIES = ["elastic", "paper", "fcfs", "fixed:2", "static:2"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("service", "fields", "reason"),
    [
        (ServiceSpec(name="s", cells=(4,), memory_mb=50), {}, "no node has 4 cells of 50 MB for service s, and 0 MB beside them"),
        (ServiceSpec(name="s", memory_mb=101), {}, "service s needs 101 MB per cell, a cell has 100 MB"),
        (ServiceSpec(name="s", cells=(8,)), {}, "needs 8 cells, the largest node has 4"),
        (ServiceSpec(name="s", cells=(1, 8), sizes=(8,)), {"cells": [1, 8]}, "needs 8 cells, the largest node has 4"),
        (ServiceSpec(name="s"), {"requires": ("nvlink",)}, "no node with GPUs has the labels nvlink"),
    ],
)
def test_what_no_node_could_hold_is_refused_at_once(
    world: Any, policy: str, service: ServiceSpec, fields: dict[str, Any], reason: str
) -> None:
    # Given a node with many small cells, another with one large cell, and one without GPUs
    w = world(policy, services=[service]).node("n0", cells=4, cell_memory_mb=10).node("n1", cells=1, cell_memory_mb=100)
    w.node("n2", pools=("cpu",), labels=frozenset({"nvlink"}))
    w.score("a", "s", **fields)
    assert w.ended("a") == ("rejected", reason)


def test_a_service_whose_equal_part_is_too_small_is_refused_at_once(world: Any) -> None:
    w = world("static:2", services=["rm", "judge", WIDE]).node(cells=4)
    w.score("a", "wide")
    assert w.ended("a") == ("rejected", "needs 2 cells, equal parts of all cells are 1 for each of 3 services")


@pytest.mark.parametrize("policy", ["paper", "fcfs", "fixed:2"])
def test_what_pinned_services_leave_no_room_for_keeps_nobody_waiting(world: Any, policy: str) -> None:
    w = world(policy, services=[PINNED, "rm", WIDE]).node(cells=2)
    w.score("p0", "pinned", finish=True)
    w.score("w", "wide")
    w.score("p1", "pinned")
    w.score("a", "rm")
    assert w.waiting == ["w"]


def test_an_overdue_action_that_pinned_services_leave_no_room_for_claims_no_node(world: Any) -> None:
    # Given a pinned service on one of two cells, and a starving action for both
    w = world(services=[PINNED, "rm", "judge", WIDE]).node(cells=2)
    w.score("p", "pinned", finish=True)
    w.score("w", "wide")
    w.tick(TUNING.aged_s)
    for name, service in (("a", "rm"), ("b", "judge")):
        w.score(name, service)
        while name in w.waiting:
            w.wake()
        w.finish(name)
    assert w.waiting == ["w"]


def test_an_instance_that_makes_way_for_a_larger_one_is_not_brought_back_meanwhile(world: Any) -> None:
    # Given a service that may have one instance, on one cell, which is to make way for one on two
    w = world(services=[ServiceSpec(name="one", cells=(1, 2), restore_s=0.5, instances_per_node=1), "rm", "judge"]).node(cells=2)
    w.score("a", "one", cells=[1])
    w.score("b", "rm")
    w.finish("a")
    w.score("large", "one", cells=[2])
    w.tick(TUNING.aged_s)
    # When another action comes that could run on the small one
    w.score("small", "one", cells=[1, 2])
    assert w.waiting == ["large", "small"]
    w.finish("b")
    # Then both run on the large one, one after the other
    assert w.evicted("large") == ["one", "rm"]
    w.finish("large")
    assert (w.grants["small"].units, w.grants["small"].restore) == (2, False)
