"""The search for the smallest size that meets a target."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from app.planning.search import between, bracket, knee, settle


@given(st.integers(1, 400), st.integers(1, 400), st.integers(1, 8), st.lists(st.integers(-5, 500), max_size=3))
def test_where_more_is_never_worse_the_search_finds_the_least_that_meets(least: int, more: int, at_once: int, first: list[int]) -> None:
    asked: list[int] = []

    def meets(sizes: Sequence[int]) -> list[bool]:
        asked.extend(sizes)
        return [size >= least for size in sizes]

    most = least + more
    found = bracket(meets, 0, most, at_once, first)
    assert found == least
    assert len(asked) == len(set(asked)) and all(0 < size < most for size in asked)
    assert settle(meets, found, most) == least


@given(st.sets(st.integers(1, 60)), st.integers(1, 4))
def test_the_search_ends_at_a_size_that_meets_and_whose_predecessor_does_not(lucky: set[int], at_once: int) -> None:
    def meets(sizes: Sequence[int]) -> list[bool]:
        return [size in lucky or size >= 50 for size in sizes]

    found = bracket(meets, 0, 60, at_once)
    assert meets([found]) == [True] and (found == 1 or meets([found - 1]) == [False])

    settled = settle(meets, found, 60)
    assert settled is not None and meets([settled, settled + 1]) == [True, True]


def test_a_size_that_meets_by_luck_is_passed_over() -> None:
    assert settle(lambda sizes: [size in (5, 8, 9, 10) for size in sizes], 5, 10) == 8
    assert settle(lambda sizes: [False for _ in sizes], 5, 10) is None
    assert settle(lambda sizes: [size == 10 for size in sizes], 5, 10) == 10


def test_points_lie_between_at_equal_ratios() -> None:
    assert between(2, 32, 3) == [4, 8, 16]
    assert between(7, 8, 3) == []
    assert between(0, 2, 4) == [1]


def test_the_knee_is_where_more_cores_stop_to_help() -> None:
    assert knee([(1, 8.0), (2, 4.0), (4, 2.1), (8, 2.05), (16, 2.04)]) == 4
    assert knee([(1, 8.0), (2, 4.0)]) is None
    assert knee([]) is None
