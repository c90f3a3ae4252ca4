"""Services on GPU cells: residency, eviction, concurrency, static shares."""

from __future__ import annotations

from typing import Any

from scheduler.model import ServiceSpec

RM = ServiceSpec(name="rm", restore_s=0.5)
JUDGE = ServiceSpec(name="judge", restore_s=2.0)
TEACHER = ServiceSpec(name="teacher", cells=(2,), restore_s=5.0)


def test_under_paper_the_service_that_was_used_longest_ago_is_evicted(world: Any) -> None:
    w = world("paper", services=[RM, JUDGE, ServiceSpec(name="third")]).node(cells=2)
    for at, (name, service) in enumerate([("a", "rm"), ("b", "judge"), ("c", "rm")]):
        w.now = float(at)
        w.score(name, service, finish=True)
    w.score("d", "third")
    assert w.evicted("d") == ["judge"]
    assert w.grants["d"].cell_ids == (1,)


def test_a_service_that_a_node_holds_once_waits_for_its_place_and_holds_up_nobody(world: Any) -> None:
    w = world(services=[ServiceSpec(name="rm", instances_per_node=1), JUDGE]).node(cells=3)
    w.score("a", "rm")
    w.score("b", "rm")
    w.score("c", "judge")
    assert w.waiting == ["b"]
    assert {w.grants["a"].cell_ids, w.grants["c"].cell_ids} == {(0,), (2,)}


def test_under_paper_a_large_service_is_not_starved_by_small_ones_behind_it(world: Any) -> None:
    w = world("paper", services=[RM, JUDGE, TEACHER]).node(cells=2)
    w.score("a", "rm")
    w.score("t", "teacher")
    w.score("b", "judge")
    assert w.waiting == ["t", "b"]
    w.finish("a")
    assert w.waiting == ["b"]


def test_elastic_gives_the_cells_to_the_action_that_gains_most(world: Any) -> None:
    w = world(services=[ServiceSpec(name="a", cells=(1, 2)), ServiceSpec(name="b", cells=(1, 2))])
    w.score("flat", "a", [1, 2], work_s=10.0)
    w.score("steep", "b", [1, 2], work_s=10.0, parallel=1.0)
    w.node(cells=3)
    assert w.units == {"flat": 1, "steep": 2}


def test_under_static_each_service_owns_its_share_for_good(world: Any) -> None:
    w = world("static:1", services=[RM, JUDGE]).node(cells=4)
    for number in range(3):
        w.score(f"s{number}", "rm")
    assert w.waiting == ["s2"]
    # When one has nothing to do, the other still has only its own
    w.finish("s0")
    assert "s2" in w.grants
    assert w.grants["s2"].restore is False
    w.score("j", "judge")
    assert w.grants["j"].cell_ids == (2,)
