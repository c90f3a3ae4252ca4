"""Services on GPU cells: who is served by what is resident, who is worth a swap, who makes way, and between which jobs."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.gpu.tuning import TUNING
from scheduler.model import ServiceSpec, events

# Under `elastic`


def test_elastic_gives_the_cells_to_the_action_that_gains_most(world: Any) -> None:
    w = world(services=[ServiceSpec(name="a", cells=(1, 2)), ServiceSpec(name="b", cells=(1, 2))])
    w.score("flat", "a", [1, 2], work_s=10.0)
    w.score("steep", "b", [1, 2], work_s=10.0, parallel=1.0)
    w.node(cells=3)
    assert w.units == {"flat": 1, "steep": 2}


def test_one_restore_serves_all_that_wait_for_a_service(world: Any) -> None:
    # Given a busy cell, and four that wait for another service with room for three of them
    w = world(services=["rm", ServiceSpec(name="many", restore_s=0.5, max_concurrency=3)]).node(cells=1)
    w.score("a", "rm")
    w.several(w.score, "m", 4, "many")
    w.finish("a")
    w.tick(3.0)
    # Then one of them brings the instance, and as many others start on it as it takes
    assert [w.grants[f"m{number}"].restore for number in range(3)] == [True, False, False]
    assert (w.evicted("m0"), w.waiting) == (["rm"], ["m3"])


def test_the_instance_that_is_least_asked_for_goes(world: Any) -> None:
    # Given two idle instances, of which the one used last is seldom asked for
    w = world(services=["rm", "judge", "third"]).node(cells=2)
    for name, service in (("a", "rm"), ("b", "rm"), ("c", "rm"), ("j", "judge")):
        w.score(name, service, finish=True)
    w.score("t", "third")
    assert w.evicted("t") == ["judge"]


def test_a_service_on_two_cells_has_its_turn_among_small_ones(world: Any) -> None:
    w = world(services=["rm", "judge", ServiceSpec(name="pair", cells=(2,), restore_s=0.5)]).node(cells=2)
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
    w = world(services=["rm", "judge", "third"]).node(cells=1)
    w.score("a", "rm")
    w.score("low", "judge")
    w.score("high", "third", priority=9)
    w.tick(3.0)
    w.finish("a")
    assert "high" in w.grants
    assert w.waiting == ["low"]


# Between jobs: one within its share is brought its service, though one beyond it could keep all instances busy for ever


def flood(w: Any, count: int) -> None:
    """Have a job ask for far more than the cells can do."""
    w.several(w.score, "f", count, "flooded", job="flood")


def test_an_instance_that_falls_idle_goes_to_whom_cells_are_owed(world: Any) -> None:
    # Given cells that are all busy with a job that has more waiting, and an action of another job for a service that is nowhere
    w = world(services=["flooded", "rare"]).node(cells=4)
    flood(w, 10)
    w.score("r", "rare", job="modest")
    w.finish("f0")
    assert w.evicted("r") == ["flooded"]
    w.finish("f1")
    assert "f4" in w.grants


@pytest.mark.parametrize("without", [[], ["shares"]])
def test_cells_that_are_kept_for_somebody_are_used_again_when_it_is_cancelled(world: Any, without: list[str]) -> None:
    # Given an instance that is kept idle for an action which needs more cells than are idle
    w = world(services=["flooded", ServiceSpec(name="wide", cells=(4,), restore_s=0.5)], without=without).node(cells=4)
    flood(w, 10)
    w.score("w", "wide", job="modest", trajectory="t")
    w.tick(1.0)
    w.finish("f0")
    assert ("f4" in w.grants) == bool(without)
    w.handle(events.Cancelled(ids=("w",), reason="not wanted"))
    w.tick(1.0)
    assert {"f1", "f2", "f3", "f4"} <= set(w.grants)


# Under other policies, and instances of which a node holds one


def test_under_paper_an_action_has_the_cells_that_are_free_beside_a_busy_one(world: Any) -> None:
    w = world("paper", services=["rm", ServiceSpec(name="a", cells=(1, 2)), ServiceSpec(name="b", cells=(1, 2))]).node(cells=3)
    w.score("idle", "rm", finish=True)
    w.score("flat", "a", [1, 2], work_s=10.0)
    w.score("steep", "b", [1, 2], work_s=10.0, parallel=1.0)
    assert w.units == {"flat": 1, "steep": 2} and w.evicted("steep") == ["rm"]


def test_under_paper_the_service_that_was_used_longest_ago_is_evicted(world: Any) -> None:
    w = world("paper", services=["rm", "judge", "third"]).node(cells=2)
    for at, (name, service) in enumerate([("a", "rm"), ("b", "judge"), ("c", "rm")]):
        w.now = float(at)
        w.score(name, service, finish=True)
    w.score("d", "third")
    assert w.evicted("d") == ["judge"]
    assert w.grants["d"].cell_ids == (1,)


def test_a_service_that_a_node_holds_once_waits_for_its_place_and_holds_up_nobody(world: Any) -> None:
    w = world(services=[ServiceSpec(name="rm", instances_per_node=1), "judge"]).node(cells=3)
    w.score("a", "rm")
    w.score("b", "rm")
    w.score("c", "judge")
    assert w.waiting == ["b"]
    assert {w.grants["a"].cell_ids, w.grants["c"].cell_ids} == {(0,), (2,)}


def test_under_paper_a_large_service_is_not_starved_by_small_ones_behind_it(world: Any) -> None:
    w = world("paper", services=["rm", "judge", ServiceSpec(name="teacher", cells=(2,), restore_s=5.0)]).node(cells=2)
    w.score("a", "rm")
    w.score("t", "teacher")
    w.score("b", "judge")
    assert w.waiting == ["t", "b"]
    w.finish("a")
    assert w.waiting == ["b"]


def test_under_static_each_service_owns_its_share_for_good(world: Any) -> None:
    w = world("static:1", services=["rm", "judge"]).node(cells=4)
    w.several(w.score, "s", 3, "rm")
    assert w.waiting == ["s2"]
    # When one has nothing to do, the other still has only its own
    w.finish("s0")
    assert "s2" in w.grants
    assert w.grants["s2"].restore is False
    w.score("j", "judge")
    assert w.grants["j"].cell_ids == (2,)
