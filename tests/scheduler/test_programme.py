"""Sharing out units: the dynamic programme against every possible division."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.choosing.programme import Amounts, Programme

DURATIONS = st.floats(0.0, 100.0, allow_nan=False, width=32)


@st.composite
def demands(draw: st.DrawFn) -> Amounts:
    units = tuple(sorted(draw(st.sets(st.integers(1, 9), min_size=1, max_size=4))))
    return Amounts(units, tuple(draw(DURATIONS) for _ in units))


def least_total_s(wanted: list[Amounts], units: int) -> float:
    ways = product(*(range(len(demand.units)) for demand in wanted))
    fitting = (way for way in ways if sum(d.units[i] for d, i in zip(wanted, way, strict=True)) <= units)
    return min(sum(d.durations_s[i] for d, i in zip(wanted, way, strict=True)) for way in fitting)


def least_units(wanted: list[Amounts]) -> int:
    return sum(demand.units[0] for demand in wanted)


@given(st.lists(demands(), min_size=1, max_size=4), st.integers(0, 14))
def test_the_programme_is_optimal_for_every_prefix_and_every_amount_of_spare(wanted: list[Amounts], spare: int) -> None:
    programme = Programme(wanted, spare)
    for count in range(1, len(wanted) + 1):
        for less in {0, spare // 2, spare}:
            chosen = programme.best(count, less)
            prefix = wanted[:count]
            best = least_total_s(prefix, least_units(prefix) + less)
            assert sum(d.units[i] - d.units[0] for d, i in zip(prefix, chosen, strict=True)) <= less
            assert sum(d.durations_s[i] for d, i in zip(prefix, chosen, strict=True)) == pytest.approx(best, abs=1e-6)


def chosen(wanted: list[Amounts], units: int) -> list[int]:
    spare = units - least_units(wanted)
    return [demand.units[index] for demand, index in zip(wanted, Programme(wanted, spare).best(len(wanted), spare), strict=True)]


def test_savings_that_are_mere_rounding_buy_no_units() -> None:
    rounded = Amounts((1, 2, 3), (9.0, 8.9999999999999, 8.9999999999999))
    assert chosen([rounded], 3) == [1]
