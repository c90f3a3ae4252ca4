"""The plan: which instances of which services the cells should hold; and the demand that it goes by."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.model import Waiting
from scheduler.placement import Target, Want, plan, sojourn_s
from scheduler.resources.demand import Demands
from tangram.action import Action


def want(rate: float, *, restore_s: float = 0.5, places: int = 1, most: int = 99, work_s: float = 1.0) -> Want:
    durations_s = (work_s, work_s / 1.84, work_s / 3.2)
    return Want(rate=rate, units=(1, 2, 4), durations_s=durations_s, places=places, restore_s=restore_s, most=most)


def waiting(service: str, at: float, work_s: float = 1.0) -> Waiting:
    action = Action(kind="gpu.score", service=service)
    return Waiting(id="a", action=action, seq=1, submitted_at=at, received_at=at, units=(1,), durations_s=(work_s,))


def test_a_lone_service_that_is_seldom_asked_for_has_one_instance_on_its_best_size() -> None:
    assert plan([want(0.01)], 8) == [Target(1, 4)]


def test_a_service_in_much_demand_has_many_small_instances() -> None:
    # Given more actions than large instances, which waste some of their cells, could serve
    (target,) = plan([want(6.8)], 8)

    assert target == Target(8, 1)


def test_cells_go_where_the_demand_is() -> None:
    hot, cold = plan([want(4.0), want(0.2)], 8)

    assert hot.cells > cold.cells >= 1


def test_a_service_that_nobody_asks_for_has_nothing_where_cells_are_short() -> None:
    assert plan([want(0.0), want(2.0)], 4)[0] == Target()


def test_no_more_instances_are_planned_than_there_may_be() -> None:
    (target,) = plan([want(2.0, most=1)], 8)

    assert target == Target(1, 4)


def test_places_on_one_instance_spare_others() -> None:
    (alone,), (shared,) = plan([want(6.0)], 8), plan([want(6.0, places=4)], 8)

    assert shared.instances < alone.instances


@given(st.lists(st.tuples(st.floats(0.0, 20.0), st.integers(1, 4)), min_size=1, max_size=9), st.integers(1, 40))
def test_a_plan_fits_onto_the_cells(services: list[tuple[float, int]], cells: int) -> None:
    targets = plan([want(rate, places=places) for rate, places in services], cells)

    assert sum(target.cells for target in targets) <= cells


@settings(max_examples=50)
@given(st.lists(st.floats(0.01, 4.0), min_size=1, max_size=3), st.integers(1, 6))
def test_no_other_way_is_expected_to_cost_less(rates: list[float], cells: int) -> None:
    def cost(rate: float, target: Target) -> float:
        if not target.instances:
            return rate * (1.0 + 12 * 0.5 + 1.0)
        return rate * sojourn_s(rate, target.instances, {1: 1.0, 2: 1.0 / 1.84, 4: 1.0 / 3.2}[target.size])

    targets = plan([want(rate) for rate in rates], cells)

    ways = [Target(), *(Target(count, size) for size in (1, 2, 4) for count in range(1, cells // size + 1))]
    all_ways = (way for way in itertools.product(ways, repeat=len(rates)) if sum(target.cells for target in way) <= cells)
    best = min(sum(map(cost, rates, way)) for way in all_ways)
    assert sum(map(cost, rates, targets)) <= best * 1.02 + 1e-9


def test_waiting_grows_with_the_load_and_without_end_beyond_it() -> None:
    stays = [sojourn_s(rate, 2, 1.0) for rate in (0.1, 1.0, 1.8, 2.0, 4.0, 8.0)]

    assert stays == sorted(stays) and stays[0] == pytest.approx(1.0, abs=0.01) and stays[-1] > 10.0


def test_the_rate_of_a_steady_stream_is_found_and_fades_when_it_ends() -> None:
    # Given two arrivals a second
    demands = Demands()
    for number in range(120):
        demands.come(waiting("rm", number / 2), number / 2)
    assert demands.rate("rm") == pytest.approx(2.0, rel=0.1)

    # When they end
    demands.by_service["rm"].forget(160.0)

    # Then little is left of it
    assert demands.rate("rm") < 0.02


def test_actions_that_came_before_a_restart_count_for_less() -> None:
    demands = Demands()
    demands.come(waiting("old", 0.0), 40.0)
    demands.come(waiting("new", 40.0), 40.0)

    assert demands.rate("old") < 0.01 * demands.rate("new")
