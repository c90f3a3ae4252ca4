"""What is expected of durations, and how it is learned."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.learning.durations import (
    FADING,
    LEAST_LEFT,
    OUTLIER,
    PRIOR,
    SETTLED,
    USUAL_S,
    Distribution,
    Durations,
    Observation,
    speed_on,
)
from tangram.action import DEFAULT_JOB, Action, Cost
from tangram.elasticity import FLAT, Amdahl, Table

WORK = st.lists(st.floats(0.01, 1000.0), min_size=1, max_size=30)


def action(name: str | None = "test", *, cores: Any = 1, **fields: Any) -> Action:
    given = {"kind": "cpu.exec", "job": DEFAULT_JOB, "environment": "e0", "cost": Cost.of(cores=cores), "action_class": name}
    return Action(**{**given, **fields})


def observe(durations: Durations, one: Action, work_s: float, times: int = 1, *, held: float = 1.0, cpu_s: float | None = None) -> None:
    for _ in range(times):
        execution_s = work_s / speed_on(one.curve, held)
        durations.observe(one, durations.expect(one), work_s=work_s, held_units=held, execution_s=execution_s, cpu_s=cpu_s)


def learned(*observations: float, **fields: Any) -> Durations:
    durations = Durations(learning=True)
    for work_s in observations:
        observe(durations, action(**fields), work_s)
    return durations


# The mean, and what few observations are worth


@given(WORK)
def test_few_observations_are_pulled_towards_the_level_above_them(others: list[float]) -> None:
    # Given a class that another job has run
    durations = Durations(learning=True)
    others = others[: SETTLED - 1]
    for work_s in others:
        observe(durations, action(job="other"), work_s)

    # Then what it took counts for as many as it is, what its kind took for PRIOR, and what that usually takes for PRIOR there
    def pulled(seen: list[float], above: float) -> float:
        return (math.fsum(seen) + PRIOR * above) / (len(seen) + PRIOR)

    of_kind = pulled(others, USUAL_S["cpu.exec"])
    assert durations.expect(action(job="mine")).work_s == pytest.approx(pulled(others, of_kind), rel=0.02)
    assert durations.expect(action("new")).work_s == pytest.approx(of_kind, rel=0.02)
    # When this job has run it once; then that counts for one
    observe(durations, action(job="mine"), 5.0)
    of_all = pulled([*others, 5.0], pulled([*others, 5.0], USUAL_S["cpu.exec"]))
    assert durations.expect(action(job="mine")).work_s == pytest.approx(pulled([5.0], of_all), rel=0.02)


# No median is below 1, so none of these is beyond what one observation counts for at most.
@given(st.lists(st.floats(1.0, OUTLIER), min_size=1, max_size=200))
def test_the_mean_is_that_of_fading_observations(work: list[float]) -> None:
    distribution = Distribution()
    for work_s in work:
        distribution.add(work_s)
    weights = [FADING**age for age in reversed(range(len(work)))]
    assert distribution.count == pytest.approx(math.fsum(weights))
    assert distribution.mean_s() == pytest.approx(math.fsum(w * s for w, s in zip(weights, work, strict=True)) / math.fsum(weights))


def test_a_very_long_life_keeps_its_figures() -> None:
    # Given so many observations that the weights have to be scaled down on the way
    distribution = Distribution()
    for _ in range(30_000):
        distribution.add(3.0)
    assert distribution.mean_s() == pytest.approx(3.0)
    assert distribution.quantile(0.5) == pytest.approx(3.0)
    assert distribution.scale < 1e12


def test_one_observation_far_out_counts_for_a_few_medians() -> None:
    distribution = Distribution()
    for _ in range(100):
        distribution.add(1.0)
    distribution.add(1e6)
    assert distribution.mean_s() < 1.0 + OUTLIER / 90


@given(WORK)
def test_expectations_are_positive_and_within_what_was_seen(work: list[float]) -> None:
    estimate = learned(*work).expect(action())
    assert min(*work, USUAL_S["cpu.exec"]) * 0.99 <= estimate.work_s <= max(*work, USUAL_S["cpu.exec"]) * 1.01
    for done_s in (0.0, 0.5, 10.0, 1e5):
        assert 0.0 < estimate.left_s(done_s) < math.inf


def test_jobs_kinds_classes_and_amounts_are_told_apart() -> None:
    durations = learned(*[50.0] * 20)
    assert durations.expect(action()).work_s == pytest.approx(50.0, rel=0.1)
    assert durations.expect(action(cores=[1, 2])).work_s == USUAL_S["cpu.exec"]
    assert durations.expect(action(kind="build")).work_s == 1.0


def test_what_has_outlived_the_short_ones_is_expected_to_be_a_long_one() -> None:
    estimate = learned(*[2.0, 2.0, 2.0, 14.0] * 25).expect(action())
    assert estimate.work_s == pytest.approx(5.0, rel=0.1)
    assert estimate.left_s(0.0) == pytest.approx(5.0, rel=0.1)
    assert estimate.left_s(5.0) == pytest.approx(9.0, rel=0.02)


def test_without_anything_learned_a_declared_action_is_always_nearly_done_and_an_unknown_one_is_not() -> None:
    durations = Durations(learning=True)
    declared, unknown = durations.expect(action(work_s=10.0)), durations.expect(action())
    assert declared.left_s(4.0) == 6.0
    assert declared.left_s(50.0) == LEAST_LEFT * 10.0
    assert unknown.left_s(0.25) == 0.75
    assert unknown.left_s(50.0) == 50.0


def test_declarations_are_corrected_by_what_they_are_usually_wrong_by() -> None:
    # Given a class that always takes three times what is declared, of very different lengths
    durations, draw = Durations(learning=True), random.Random(1)
    for _ in range(100):
        declared_s = draw.lognormvariate(0.0, 2.0)
        observe(durations, action(work_s=declared_s), 3.0 * declared_s)
    for declared_s in (0.1, 1.0, 50.0):
        assert durations.expect(action(work_s=declared_s)).work_s == pytest.approx(3.0 * declared_s, rel=0.05)


def test_declarations_that_say_nothing_are_dropped() -> None:
    durations, draw = Durations(learning=True), random.Random(1)
    for _ in range(100):
        observe(durations, action(work_s=draw.choice([0.01, 1000.0])), 10.0)
    assert durations.expect(action(work_s=0.01)).work_s == pytest.approx(10.0, rel=0.1)


def test_without_learning_what_was_declared_is_all_that_counts() -> None:
    durations = Durations(learning=False, history=[seen()] * 20)
    observe(durations, action(), 50.0, 20)
    assert durations.expect(action()).work_s == USUAL_S["cpu.exec"]
    assert durations.expect(action(work_s=3.0)).work_s == 3.0


@pytest.mark.parametrize(("held", "used", "believed"), [(4.0, 8.0 / Amdahl(0.9).speedup(4), False), (4.0, 8.0, True), (1.0, 8.0, True)])
def test_a_class_that_burns_one_core_of_many_is_not_taken_for_parallel(held: float, used: float, believed: bool) -> None:
    # Given a class that declares that it is parallel; when it uses less than that says, or as much, or has but one core
    durations, one = Durations(learning=True), action(cores=[1, 2, 4], curve=Amdahl(0.9))
    observe(durations, one, 8.0, 20, held=held, cpu_s=used)
    curve = durations.expect(one).curve
    assert curve == Amdahl(0.9) if believed else speed_on(curve, 4) == pytest.approx(1.0)


# History, and how far off it all was


def seen(**fields: Any) -> Observation:
    given = {"job": DEFAULT_JOB, "kind": "cpu.exec", "action_class": "test", "service": None, "units": (1,), "curve": FLAT}
    return Observation(**{**given, "held_units": 1.0, "execution_s": 20.0, "cpu_s": 1.0, **fields})


def test_history_counts_like_what_is_seen_and_on_many_cores_as_work_of_one() -> None:
    durations = Durations(learning=True, history=[seen()] * 40)
    estimate = durations.expect(action())
    assert estimate.work_s == pytest.approx(20.0, rel=0.1)
    assert durations.error().predictions == 0
    wide = seen(units=(1, 2, 4), curve=Amdahl(1.0), held_units=4.0, cpu_s=80.0)
    assert Durations(learning=True, history=[wide] * 400).expect(action(cores=[1, 2, 4], curve=Amdahl(1.0))).work_s == pytest.approx(80.0)


def test_the_error_is_a_factor_either_way() -> None:
    durations = Durations(learning=False)
    error = durations.error()
    assert (error.predictions, error.factor_p50, error.factor_p90) == (0, 1.0, 1.0)
    for work_s in [2.0] * 4 + [0.5] * 4 + [1.0] * 1 + [16.0]:
        observe(durations, action(work_s=1.0), work_s)
    error = durations.error()
    assert (error.predictions, error.factor_p50, error.factor_p90) == (10, 2.0, 2.0)
    observe(durations, action(work_s=1.0), 16.0, 5)
    assert durations.error().factor_p90 == 16.0


def test_between_two_points_of_a_table_the_speed_is_on_the_line() -> None:
    table = Table(((2, 0.9), (4, 0.5)))
    assert [speed_on(table, units) for units in (1, 1.5, 2, 2.5, 3, 4)] == pytest.approx([1.0, 1.4, 1.8, 1.85, 1.9, 2.0])
