"""The work that is left of an action and of its trajectory: what the tables of a job take in, and when."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.learning.durations import Observation
from scheduler.learning.life_table import BINS, EDGES, FIRST_S, PRIOR, PRIOR_END, LifeTable, bin_of
from scheduler.learning.work_left import ACTION_FRACTION, Life, WorkLeft, next_bin_s
from tangram.elasticity import FLAT


def ended(work: WorkLeft, job: str, *lengths_s: float) -> None:
    """Have actions without an environment run for so long, and end."""
    for work_s in lengths_s:
        life = Life()
        work.note(job, life, work_s, None, 0.0)
        work.action_ended(job, life)


def at(work_s: float) -> Life:
    return Life(work_s, bin_of(work_s))


def long_in(work: WorkLeft, job: str, trajectory: Life | None = None) -> float:
    """Return the rank of an action that is long by any measure."""
    return work.rank(job, at(1000.0), trajectory, 4.0)


def seen(**fields: Any) -> Observation:
    given = {"job": "a", "kind": "cpu.exec", "action_class": None, "service": None, "units": (1,), "curve": FLAT}
    return Observation(**{**given, "held_units": 1.0, "execution_s": 8.0, "cpu_s": 8.0, **fields})


def test_of_an_action_in_an_environment_that_of_its_trajectory_counts_and_a_part_of_its_own() -> None:
    work = WorkLeft()
    rank = work.rank("a", at(EDGES[5]), at(EDGES[10]), 4.0)
    assert rank == pytest.approx((EDGES[10] + ACTION_FRACTION * EDGES[5]) / (FIRST_S + ACTION_FRACTION * FIRST_S))


def test_jobs_learn_apart() -> None:
    work = WorkLeft()
    ended(work, "a", *[100.0] * 30)
    assert work.rank("b", at(EDGES[10]), None, 4.0) == pytest.approx(EDGES[10] / FIRST_S)


def test_an_action_is_long_when_much_more_is_left_of_it_than_of_one_that_begins() -> None:
    # Given a job with many short actions, of which one in twenty lasts
    work = WorkLeft()
    ended(work, "a", *([0.5] * 19 + [100.0]) * 30)
    # Then one that has outlived the short ones is long, by this measure, and all others have the same rank
    assert [work.rank("a", at(work_s), None, 4.0) > 1.0 for work_s in (0.0, 0.3, 1.0, 20.0)] == [False, False, True, True]
    assert {work.rank("a", at(work_s), at(50.0), 4.0) for work_s in (0.0, 0.3)} == {1.0}
    assert work.rank("a", at(1.0), None, 32.0) == 1.0


@pytest.mark.parametrize("work_s", [0.0, 1.0, 3.0, 4.9])
def test_where_all_actions_are_alike_none_is_long(work_s: float) -> None:
    work = WorkLeft()
    ended(work, "a", *[5.0] * 30)
    assert work.rank("a", at(work_s), at(1000.0), 4.0) == 1.0


def test_one_that_still_runs_says_that_it_has_lasted_so_long() -> None:
    # Given a job of which many short actions have ended, and one runs
    work, long = WorkLeft(), Life()
    ended(work, "a", *[1.0] * 20)
    before = work.rank("a", at(20.0), None, 4.0)
    for work_s in (2.0, 20.0, 200.0):
        work.note("a", long, work_s, None, 0.0)
    # Then more is expected of those of its age, though it has not ended
    assert work.rank("a", at(20.0), None, 4.0) > before


def test_a_trajectory_goes_on_from_action_to_action() -> None:
    work, trajectory = WorkLeft(), Life()
    for number in range(3):
        action = Life()
        work.note("a", action, 4.0, trajectory, 4.0 * (number + 1))
        work.action_ended("a", action)
    work.trajectory_ended("a", trajectory)
    assert trajectory.work_s == 12.0
    for _ in range(200):
        alike = Life()
        work.note("a", Life(), 4.0, alike, 12.0)
        work.trajectory_ended("a", alike)
    assert long_in(work, "a", Life()) > long_in(work, "a", at(11.0))


@pytest.mark.parametrize("work_s", [0.0, 0.05, 0.1, 3.0, 1000.0])
def test_the_next_bin_is_as_far_as_its_edge(work_s: float) -> None:
    life = at(work_s)
    assert next_bin_s(life) > 0.0
    assert bin_of(work_s + next_bin_s(life) * 1.0001) == life.bin + 1


def test_history_counts_like_what_has_run() -> None:
    lived = WorkLeft()
    ended(lived, "a", *[8.0] * 40)
    told = WorkLeft([seen(environment=None)] * 40)
    assert [told.rank("a", at(edge), None, 0.0) for edge in EDGES] == [lived.rank("a", at(edge), None, 0.0) for edge in EDGES]


def test_trajectories_of_history_have_ended_but_for_those_that_are_taken_over() -> None:
    def history(count: int) -> list[Observation]:
        return [seen(environment=f"e{number}") for number in range(count) for _ in range(2)]

    # Given a hundred environments of two actions each, of which half turn out to stand still
    work = WorkLeft(history(100))
    lives = [work.resume("a", f"e{number}") for number in range(50)]
    assert {life.work_s for life in lives} == {16.0}
    # Then those count as trajectories that have had their actions and go on
    lived = WorkLeft(history(50))
    for _ in range(50):
        trajectory = Life()
        for before_s in (0.0, 8.0):
            action = Life()
            lived.note("a", action, 8.0, trajectory, before_s + 8.0)
            lived.action_ended("a", action)
    assert [long_in(work, "a", at(edge)) for edge in EDGES] == pytest.approx([long_in(lived, "a", at(edge)) for edge in EDGES])


def test_an_environment_that_history_does_not_know_begins_anew() -> None:
    work = WorkLeft([seen(environment="e0")])
    assert work.resume("a", "other").bin == -1
    assert work.resume("b", "e0").bin == -1
    assert work.resume("a", "e0").work_s == 8.0
    assert work.resume("a", "e0").bin == -1, "it is taken over once"


# The life table itself, against a naive estimator

WORK = st.floats(0.0, 1e4)
LIVES = st.lists(st.tuples(WORK, st.booleans()), max_size=60)
"""How much work each has had, and whether it has ended then or still runs."""


def table_of(lives: list[tuple[float, bool]]) -> LifeTable:
    table = LifeTable()
    for work_s, ended in lives:
        table.reach(0, bin_of(work_s))
        if ended:
            table.end(bin_of(work_s))
    return table


def naive_left_s(lives: list[tuple[float, bool]], index: int) -> float:
    """Work out what is left from the ages themselves: of those that came to a bin, how many ended in it (Kaplan and Meier)."""
    reached = sum(work_s >= EDGES[index] for work_s, _ in lives)
    if not reached or index == BINS - 1:
        return max(EDGES[index], FIRST_S)
    ended = sum(done and EDGES[index] <= work_s < EDGES[index + 1] for work_s, done in lives)
    chance = (ended + PRIOR * PRIOR_END) / (reached + PRIOR)
    width_s = EDGES[index + 1] - EDGES[index]
    return chance * width_s / 2 + (1 - chance) * (width_s + naive_left_s(lives, index + 1))


def clear_of_edges(lives: list[tuple[float, bool]]) -> bool:
    return all(abs(work_s - edge) > 1e-6 * edge for work_s, _ in lives for edge in EDGES[1:])


@given(LIVES.filter(clear_of_edges), st.integers(0, BINS - 1))
def test_it_says_what_the_ages_themselves_say(lives: list[tuple[float, bool]], index: int) -> None:
    assert table_of(lives).left_s(index) == pytest.approx(naive_left_s(lives, index))
