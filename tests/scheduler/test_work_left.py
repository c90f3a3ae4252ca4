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


def seen(**fields: Any) -> Observation:
    given = {"job": "a", "kind": "cpu.exec", "action_class": None, "service": None, "units": (1,), "curve": FLAT}
    return Observation(**{**given, "held_units": 1.0, "execution_s": 8.0, "cpu_s": 8.0, **fields})


def test_of_an_action_in_an_environment_that_of_its_trajectory_counts_and_a_part_of_its_own() -> None:
    work = WorkLeft()
    expected_s = work.expected_s("a", at(EDGES[5]), at(EDGES[10]))
    assert expected_s == pytest.approx(EDGES[10] + ACTION_FRACTION * EDGES[5])


def test_jobs_learn_apart() -> None:
    work = WorkLeft()
    ended(work, "a", *[100.0] * 30)
    assert work.expected_s("b", Life(), None) == FIRST_S


def test_one_that_still_runs_says_that_it_has_lasted_so_long() -> None:
    # Given a job of which many short actions have ended, and one runs
    work, long = WorkLeft(), Life()
    ended(work, "a", *[1.0] * 20)
    before_s = work.expected_s("a", Life(), None)
    for work_s in (2.0, 20.0, 200.0):
        work.note("a", long, work_s, None, 0.0)
    # Then more is expected of those that come, though it has not ended
    assert work.expected_s("a", Life(), None) > before_s


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
    assert work.expected_s("a", Life(), Life()) > work.expected_s("a", Life(), at(11.0))


@pytest.mark.parametrize("work_s", [0.0, 0.05, 0.1, 3.0, 1000.0])
def test_the_next_bin_is_as_far_as_its_edge(work_s: float) -> None:
    life = at(work_s)
    assert next_bin_s(life) > 0.0
    assert bin_of(work_s + next_bin_s(life) * 1.0001) == life.bin + 1


def test_history_counts_like_what_has_run() -> None:
    lived = WorkLeft()
    ended(lived, "a", *[8.0] * 40)
    told = WorkLeft([seen(environment=None)] * 40)
    assert [told.expected_s("a", at(edge), None) for edge in EDGES] == [lived.expected_s("a", at(edge), None) for edge in EDGES]


def test_trajectories_of_history_have_ended_but_for_those_that_are_taken_over() -> None:
    # Given a hundred environments of two actions each
    history = [seen(environment=f"e{number}") for number in range(100) for _ in range(2)]
    work = WorkLeft(history)
    before_s = work.expected_s("a", Life(), at(15.0))
    # When half of them turn out to stand still
    lives = [work.resume("a", f"e{number}") for number in range(50)]
    # Then they are as old as they were, and more is expected of those of their age
    assert {life.work_s for life in lives} == {16.0}
    assert work.expected_s("a", Life(), at(15.0)) > before_s


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
