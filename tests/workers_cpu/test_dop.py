"""What a program learns about its degree of parallelism."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.cpu.dop import dop_variables, with_dop


def test_common_runtimes_get_it() -> None:
    # Given a DoP of 4; when the variables are made; then each runtime finds its own
    assert dop_variables(4) == {
        "TANGRAM_DOP": "4",
        "OMP_NUM_THREADS": "4",
        "MKL_NUM_THREADS": "4",
        "OPENBLAS_NUM_THREADS": "4",
        "NUMEXPR_NUM_THREADS": "4",
        "PYTEST_XDIST_AUTO_NUM_WORKERS": "4",
        "MAKEFLAGS": "-j4",
    }


@given(dop=st.integers(1, 512), variables=st.dictionaries(st.sampled_from(["MAKEFLAGS", "TANGRAM_DOP", "OTHER"]), st.text()))
def test_values_of_the_caller_win(dop: int, variables: dict[str, str]) -> None:
    # Given any variables of the caller; when the DoP is added; then his values stand, and no name is missing
    merged = with_dop(dop, variables)
    assert {name: merged[name] for name in variables} == variables
    assert merged.keys() == dop_variables(dop).keys() | variables.keys()


def test_a_dop_below_one_is_refused() -> None:
    # Given no unit at all; when the variables are asked for; then it is refused
    with pytest.raises(ValueError, match="at least 1"):
        dop_variables(0)
