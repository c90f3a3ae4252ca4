"""What the part `shares` is worth where cores are short: a flood, in simulation."""

from __future__ import annotations

import pytest

from bench.flood import Case, lightest_act_s

pytestmark = pytest.mark.long


def test_a_flood_of_coding_rollouts_hardly_slows_down_the_lightest_job() -> None:
    # Given three jobs on 96 cores, the lightest of which runs builds and tests on many cores now and then
    case = Case(1, 96, (16, 24, 48), 200, 7)
    calm = lightest_act_s(case, 48)
    # When the third one has four times as many rollouts, then the lightest hardly feels it, which without shares it does
    assert lightest_act_s(case, case.flood) <= 1.1 * calm
    assert lightest_act_s(case, case.flood, without=("shares",)) > 2.0 * calm
