"""The duration model: `getDur(m) = T_ori / (E(m) · m)`, and the curves behind it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.elasticity import FLAT, LARGEST_AMOUNT, Amdahl, Elasticity, Table, make_curve, shown
from tangram.errors import InvalidAction


@given(st.floats(0.0, 1.0), st.integers(1, LARGEST_AMOUNT))
def test_amdahl_is_the_textbook_formula(fraction: float, units: int) -> None:
    assert Amdahl(fraction).speedup(units) == pytest.approx(1.0 / ((1.0 - fraction) + fraction / units))


@given(st.floats(0.0, 1e6), st.dictionaries(st.integers(1, 64), st.floats(1e-6, 1.0), min_size=1, max_size=6))
def test_the_duration_is_the_work_over_efficiency_times_units(work_s: float, efficiency: dict[int, float]) -> None:
    units = tuple(sorted(efficiency))
    elasticity = Elasticity(units=units, curve=Table(tuple(efficiency.items())))
    for amount in units:
        assert elasticity.duration_s(work_s, amount) == pytest.approx(work_s / (efficiency[amount] * amount))


def test_one_unit_is_fully_efficient_unless_the_table_says_otherwise() -> None:
    assert Table(((2, 0.9),)).speedup(1) == 1.0
    assert Table(((1, 0.5), (2, 0.9))).speedup(1) == 0.5


def test_the_best_amount_is_the_smallest_with_the_shortest_duration() -> None:
    assert Elasticity(units=(1, 2, 4), curve=FLAT).best_units() == 1
    assert Elasticity(units=(1, 2, 4), curve=Amdahl(0.9)).best_units() == 4
    assert Elasticity(units=(1, 2, 4), curve=Table(((2, 1.0), (4, 0.5)))).best_units() == 2


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan"), float("inf"), True, "0.5", 10**5000, [0.5]], ids=shown)
def test_a_wrong_parallel_fraction_is_refused(fraction: Any) -> None:
    with pytest.raises(InvalidAction, match="^parallel_fraction: "):
        make_curve(fraction)


WRONG_KEYS = ["0", "-1", "1.5", 1.5, True, None, "x", "1_0", "٢", "9" * 5000]
WRONG_TABLES: list[Any] = [{key: 0.5} for key in WRONG_KEYS]
WRONG_TABLES += [{str(units): 1.0 for units in range(1, 4098)}]
WRONG_TABLES += [{"2": efficiency} for efficiency in (0.0, 1.5, 5e-324, float("nan"), "0.5", None)]
WRONG_TABLES += [{"2": 0.5, 2: 0.6}, {"02": 0.5, "2": 0.5}]


@pytest.mark.parametrize("table", WRONG_TABLES, ids=shown)
def test_a_wrong_table_is_refused(table: Any) -> None:
    with pytest.raises(InvalidAction, match="^efficiency: "):
        make_curve(None, table)


def test_the_order_in_which_a_table_is_written_does_not_matter() -> None:
    assert make_curve(None, {"4": 0.7, "2": 0.9}) == Table(((2, 0.9), (4, 0.7)))
