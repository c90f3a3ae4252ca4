"""Percentiles and means, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.model.stats import percentile, summary

numbers = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50)


@given(numbers, st.floats(0, 100))
def test_a_percentile_is_the_one_of_numpy(values: list[float], q: float) -> None:
    assert percentile(sorted(values), q) == pytest.approx(float(np.percentile(values, q)), rel=1e-9, abs=1e-6)


@given(numbers)
def test_a_summary_does_not_depend_on_order(values: list[float]) -> None:
    assert summary(values) == summary(reversed(values))


def test_the_summary_of_nothing_counts_nothing() -> None:
    assert summary([]).count == 0
    assert summary([]).p99 == 0.0


@pytest.mark.parametrize(("values", "q"), [([], 50), ([1.0], -1), ([1.0], 101)])
def test_a_percentile_that_does_not_exist_is_refused(values: list[float], q: float) -> None:
    with pytest.raises(ValueError, match="percentile"):
        percentile(values, q)
