"""GPU cells under `elastic`: who is served by what is resident, who is worth a swap, who makes way."""

from __future__ import annotations

from typing import Any

from scheduler.gpu.tuning import TUNING
from scheduler.model import ServiceSpec

RM = ServiceSpec(name="rm", restore_s=0.5)
JUDGE = ServiceSpec(name="judge", restore_s=0.5)
PAIR = ServiceSpec(name="pair", cells=(2,), restore_s=0.5)


def test_one_restore_serves_all_that_wait_for_a_service(world: Any) -> None:
    # Given a busy cell, and four that wait for another service with room for three of them
    w = world(services=[RM, ServiceSpec(name="many", restore_s=0.5, max_concurrency=3)]).node(cells=1)
    w.score("a", "rm")
    for number in range(4):
        w.score(f"m{number}", "many")
    w.finish("a")
    w.tick(3.0)
    # Then one of them brings the instance, and as many others start on it as it takes
    assert [w.grants[f"m{number}"].restore for number in range(3)] == [True, False, False]
    assert (w.evicted("m0"), w.waiting) == (["rm"], ["m3"])


def test_the_instance_that_is_least_asked_for_goes(world: Any) -> None:
    # Given two idle instances, of which the one used last is seldom asked for
    w = world(services=[RM, JUDGE, ServiceSpec(name="third", restore_s=0.5)]).node(cells=2)
    for name, service in (("a", "rm"), ("b", "rm"), ("c", "rm"), ("j", "judge")):
        w.score(name, service, finish=True)
    w.score("t", "third")
    assert w.evicted("t") == ["judge"]


def test_a_service_on_two_cells_has_its_turn_among_small_ones(world: Any) -> None:
    w = world(services=[RM, JUDGE, PAIR]).node(cells=2)
    for name, service in (("a", "rm"), ("b", "judge"), ("p", "pair"), ("a1", "rm"), ("b1", "judge")):
        w.score(name, service)
    # When the large one is starving and both fall idle, one after the other
    w.tick(TUNING.aged_s)
    w.finish("a")
    assert w.waiting == ["p", "a1", "b1"]
    w.finish("b")
    assert w.grants["p"].cell_ids == (0, 1)
    assert sorted(w.evicted("p")) == ["judge", "rm"]


def test_priority_decides_which_service_has_the_cell(world: Any) -> None:
    w = world(services=[RM, JUDGE, ServiceSpec(name="third", restore_s=0.5)]).node(cells=1)
    w.score("a", "rm")
    w.score("low", "judge")
    w.score("high", "third", priority=9)
    w.tick(3.0)
    w.finish("a")
    assert "high" in w.grants
    assert w.waiting == ["low"]
