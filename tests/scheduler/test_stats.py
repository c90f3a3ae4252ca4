"""Percentiles and means, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.model.stats import summary

numbers = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50)


@given(numbers)
def test_its_figures_are_those_of_numpy(values: list[float]) -> None:
    found = summary(values)
    assert (found.p50, found.p95, found.p99) == pytest.approx(tuple(np.percentile(values, (50, 95, 99))), rel=1e-9, abs=1e-6)
    assert found.mean == pytest.approx(np.mean(values), rel=1e-9, abs=1e-6)


def test_the_summary_of_nothing_counts_nothing() -> None:
    assert summary([]).count == 0
    assert summary([]).p99 == 0.0
