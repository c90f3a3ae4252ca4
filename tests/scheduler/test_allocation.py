"""Sharing out units: the greedy walk and the dynamic programme against every possible division."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.policies import allocation
from scheduler.policies.allocation import Demand, Programme, allocate, by_marginal_gain

DURATIONS = st.floats(0.0, 100.0, allow_nan=False, width=32)


@st.composite
def demands(draw: st.DrawFn) -> Demand:
    units = tuple(sorted(draw(st.sets(st.integers(1, 9), min_size=1, max_size=4))))
    return Demand(units, tuple(draw(DURATIONS) for _ in units))


@st.composite
def diminishing(draw: st.DrawFn) -> Demand:
    fraction = draw(st.floats(0.0, 1.0))
    work_s = draw(st.floats(0.1, 100.0))
    return Demand((1, 2, 3, 4, 5), tuple(work_s * (1 - fraction + fraction / m) for m in (1, 2, 3, 4, 5)))


def least_total_s(wanted: list[Demand], units: int) -> float:
    ways = product(*(range(len(demand.units)) for demand in wanted))
    fitting = (way for way in ways if sum(d.units[i] for d, i in zip(wanted, way, strict=True)) <= units)
    return min(sum(d.durations_s[i] for d, i in zip(wanted, way, strict=True)) for way in fitting)


def total_s(wanted: list[Demand], amounts: list[int]) -> float:
    return sum(demand.durations_s[demand.units.index(amount)] for demand, amount in zip(wanted, amounts, strict=True))


def least_units(wanted: list[Demand]) -> int:
    return sum(demand.units[0] for demand in wanted)


@given(st.lists(demands(), min_size=1, max_size=4), st.integers(0, 14))
def test_the_result_is_as_good_as_the_best_division(wanted: list[Demand], spare: int) -> None:
    units = least_units(wanted) + spare

    amounts = allocate(wanted, units)

    assert sum(amounts) <= units
    assert total_s(wanted, amounts) == pytest.approx(least_total_s(wanted, units), abs=1e-6)


@given(st.lists(demands(), min_size=1, max_size=4), st.integers(0, 14))
def test_a_greedy_walk_that_calls_itself_proven_is_optimal(wanted: list[Demand], spare: int) -> None:
    walk = by_marginal_gain(wanted, spare)
    total = sum(demand.durations_s[index] for demand, index in zip(wanted, walk.chosen, strict=True))
    used = sum(demand.units[index] - demand.units[0] for demand, index in zip(wanted, walk.chosen, strict=True))

    assert used <= spare
    if walk.proven:
        assert total == pytest.approx(least_total_s(wanted, least_units(wanted) + spare), abs=1e-6)


@given(st.lists(diminishing(), min_size=1, max_size=4), st.integers(0, 12))
def test_single_steps_with_diminishing_returns_are_always_proven(wanted: list[Demand], spare: int) -> None:
    assert by_marginal_gain(wanted, spare).proven


@given(st.lists(demands(), min_size=1, max_size=4), st.integers(0, 14))
def test_the_programme_is_optimal_for_every_prefix_and_every_amount_of_spare(wanted: list[Demand], spare: int) -> None:
    programme = Programme(wanted, spare)

    for count in range(1, len(wanted) + 1):
        for less in {0, spare // 2, spare}:
            chosen = programme.best(count, less)
            prefix = wanted[:count]
            best = least_total_s(prefix, least_units(prefix) + less)
            assert sum(d.units[i] - d.units[0] for d, i in zip(prefix, chosen, strict=True)) <= less
            assert sum(d.durations_s[i] for d, i in zip(prefix, chosen, strict=True)) == pytest.approx(best, abs=1e-6)
            assert programme.total_s(count, less) == pytest.approx(best, abs=1e-6)


def test_a_curve_that_is_flat_at_first_and_steep_later_is_seen_whole() -> None:
    late = Demand((1, 2, 3, 4), (10.0, 10.0, 10.0, 1.0))
    early = Demand((1, 2), (10.0, 8.0))

    assert allocate([late, early], 5) == [4, 1]


def test_savings_that_are_mere_rounding_buy_no_units() -> None:
    rounded = Demand((1, 2, 3), (9.0, 8.999999999999998, 8.999999999999998))

    assert allocate([rounded], 3) == [1]


def test_a_large_step_that_does_not_fit_is_given_up_only_where_that_is_best() -> None:
    # Greedy takes the step of 3 for the first at once; two steps of 2 save more in all.
    steep = Demand((1, 4), (10.0, 3.4))
    others = [Demand((1, 3), (10.0, 6.0)), Demand((1, 3), (10.0, 6.0))]

    assert allocate([steep, *others], 7) == [1, 3, 3]


def test_too_few_units_for_the_smallest_amounts_are_an_error() -> None:
    with pytest.raises(ValueError, match="3 units do not hold"):
        allocate([Demand((2,), (1.0,)), Demand((2,), (1.0,))], 3)


def test_nothing_wanted_is_nothing_given() -> None:
    assert allocate([], 5) == []


@settings(max_examples=50)
@given(wanted=st.lists(demands(), min_size=1, max_size=4), spare=st.integers(0, 14))
def test_above_the_programmes_limit_the_greedy_result_is_short_by_less_than_one_step(wanted: list[Demand], spare: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(allocation, "PROGRAMME_CELLS", 0)
        amounts = allocate(wanted, least_units(wanted) + spare)

    steps = [d.durations_s[i] - min(d.durations_s[i:]) for d in wanted for i in range(len(d.units))]
    assert total_s(wanted, amounts) <= least_total_s(wanted, least_units(wanted) + spare) + max(steps) + 1e-6
