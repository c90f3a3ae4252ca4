"""What a life table says of the work that is left: hand-worked cases, and a naive estimator as an oracle."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.learning.life_table import BINS, EDGES, FIRST_S, PRIOR, PRIOR_END, RATIO, LifeTable, bin_ends_at, bin_of

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


# Bins


@given(WORK)
def test_work_lies_between_the_edges_of_its_bin(work_s: float) -> None:
    index = bin_of(work_s)

    assert EDGES[index] * (1 - 1e-6) <= work_s < bin_ends_at(index)


def test_each_edge_begins_its_bin_and_the_last_bin_has_no_end() -> None:
    assert [bin_of(edge) for edge in EDGES] == list(range(BINS))
    assert bin_of(1e9) == BINS - 1
    assert bin_ends_at(BINS - 1) == math.inf


# What is left


@pytest.mark.parametrize("index", range(BINS))
def test_where_nothing_is_known_as_long_again_is_expected_as_it_has_lasted(index: int) -> None:
    assert LifeTable().left_s(index) == max(EDGES[index], FIRST_S)


def test_what_is_beyond_all_that_anybody_has_reached_is_expected_to_last_as_long_again() -> None:
    table = table_of([(1.0, True)] * 50)

    assert table.left_s(20) == EDGES[20]


def test_one_that_has_ended_in_the_first_bin() -> None:
    # Given one life that was over at once: two of four (one of one, and one of three that are made up) end in the first bin
    table = table_of([(0.05, True)])

    # Then half of them have half of the bin left, and half of them the bin and what is expected from the next one on
    assert table.left_s(0) == pytest.approx(0.5 * 0.05 + 0.5 * (0.1 + 0.1))


def test_one_that_still_runs_in_the_second_bin_has_not_ended_in_any() -> None:
    table = table_of([(0.12, False)])

    # One of four ends in each of the two bins, all of them made up; from the third on, 0.15 s are left
    second = 0.25 * 0.025 + 0.75 * (0.05 + 0.15)
    assert table.left_s(1) == pytest.approx(second)
    assert table.left_s(0) == pytest.approx(0.25 * 0.05 + 0.75 * (0.1 + second))


@given(LIVES.filter(clear_of_edges), st.integers(0, BINS - 1))
def test_it_says_what_the_ages_themselves_say(lives: list[tuple[float, bool]], index: int) -> None:
    assert table_of(lives).left_s(index) == pytest.approx(naive_left_s(lives, index))


@given(LIVES.filter(clear_of_edges), st.integers(0, 1000))
def test_the_order_in_which_lives_are_taken_in_does_not_matter(lives: list[tuple[float, bool]], seed: int) -> None:
    shuffled = random.Random(seed).sample(lives, len(lives))

    assert [table_of(shuffled).left_s(index) for index in range(BINS)] == [table_of(lives).left_s(index) for index in range(BINS)]


@given(LIVES, st.integers(0, 20))
def test_more_is_expected_where_they_still_run_than_where_they_have_ended(lives: list[tuple[float, bool]], index: int) -> None:
    # Given the same ages, once of lives that have ended, once of lives that go on
    ended, going = table_of([(work_s, True) for work_s, _ in lives]), table_of([(work_s, False) for work_s, _ in lives])

    assert ended.left_s(index) <= going.left_s(index) + 1e-9


@given(st.integers(4, 25))
def test_of_lives_that_are_alike_less_is_left_the_older_they_are(last: int) -> None:
    # Given very many lives of about the same length
    table = LifeTable()
    for _ in range(20_000):
        table.reach(0, last)
        table.end(last)

    left_s = [table.left_s(index) for index in range(last + 1)]
    assert all(later <= 1.001 * earlier for earlier, later in pairwise(left_s)), "but for what is made up"
    assert left_s[0] == pytest.approx((EDGES[last] + EDGES[last + 1]) / 2, rel=0.05)


@given(st.floats(0.5, 1.2), st.integers(0, 100))
def test_of_heavy_tails_more_is_left_the_older_they_are(exponent: float, seed: int) -> None:
    # Given lives of which each has the same chance to last 1.5 times as long as it has (Pareto)
    draw = random.Random(seed)
    table = table_of([(FIRST_S * (1 - draw.random()) ** (-1 / exponent), True) for _ in range(3000)])

    # Then what is left grows with age, as far as there are some dozens to tell from
    left_s = [table.left_s(index) for index in range(1, 1 + int(math.log(60) / (exponent * math.log(RATIO))))]
    assert all(later > 0.8 * earlier for earlier, later in pairwise(left_s))
    assert left_s[-1] >= left_s[0]


def test_the_first_minute_in_which_only_short_ones_have_ended_misleads_nobody() -> None:
    # Given ninety short lives that have ended, and ten that go on and have had ten seconds
    known = table_of([(0.5, True)] * 90 + [(10.0, False)] * 10)

    # Then of those ten as much again is expected at least; the mean of those that have ended would say nothing
    assert known.left_s(bin_of(10.0)) >= 10.0 / RATIO


def test_one_that_had_not_ended_after_all_counts_as_going_on() -> None:
    table = table_of([(3.0, True), (0.5, True)])
    table.end(bin_of(3.0), -1)

    expected = table_of([(3.0, False), (0.5, True)])
    assert [table.left_s(index) for index in range(BINS)] == [expected.left_s(index) for index in range(BINS)]


def test_what_comes_in_counts_soon() -> None:
    # Given a table that has been read after many lives
    table = table_of([(1.0, True)] * 1000)
    before = table.left_s(5)

    # When some more come, that last much longer
    for _ in range(60):
        table.reach(0, 20)

    assert table.left_s(5) > before
