"""What a life table says of the work that is left: hand-worked cases, and a naive estimator as an oracle."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.learning.life_table import BINS, EDGES, FIRST_S, PRIOR, PRIOR_END, LifeTable, bin_of

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
