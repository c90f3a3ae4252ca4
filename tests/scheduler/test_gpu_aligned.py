"""Aligned blocks of cells, against every way that there is."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.gpu.aligned import take, whole_blocks


def whole(free: Iterable[int], size: int) -> list[int]:
    """Return where blocks of a size are wholly free."""
    there = set(free)
    return [first for first in range(0, 24, size) if there.issuperset(range(first, first + size))]


def left_whole(free: Iterable[int], taken: Iterable[int]) -> tuple[int, ...]:
    """Count the blocks that stay whole, the largest first."""
    left = set(free) - set(taken)
    return tuple(len(whole(left, size)) for size in (8, 4, 2))


def subsets() -> list[list[int]]:
    return [[cell for cell in range(8) if bits >> cell & 1] for bits in range(256)]


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_a_power_of_two_is_the_block_that_leaves_most_whole(count: int) -> None:
    for free in subsets():
        blocks = [range(first, first + count) for first in whole(free, count)]
        if not blocks:
            continue
        taken = take(free, count)
        assert list(taken) in [list(block) for block in blocks]
        assert left_whole(free, taken) == max(left_whole(free, block) for block in blocks)


@pytest.mark.parametrize("count", range(1, 9))
def test_what_is_no_block_is_made_of_as_few_as_possible(count: int) -> None:
    for free in subsets():
        if len(free) < count:
            continue
        taken = take(free, count)
        assert len(set(taken)) == count and set(taken) <= set(free)
        assert len(whole_blocks(taken)) == min(len(whole_blocks(choice)) for choice in combinations(free, count))


@given(st.sets(st.integers(0, 39)), st.integers(1, 40))
def test_of_many_trees_so_many_cells_are_taken_or_none(cells: set[int], count: int) -> None:
    free = sorted(cells)
    if count > len(free):
        with pytest.raises(ValueError, match="free"):
            take(free, count)
        return
    taken = take(free, count)
    assert list(taken) == sorted(set(taken)) and len(taken) == count and set(taken) <= cells
