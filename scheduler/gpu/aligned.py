"""Which free cells an instance gets: an aligned block, chosen so that large blocks stay whole.

A *block* of 2, 4 or 8 cells begins at a multiple of its size. Where a machine numbers its GPUs by place, the GPUs of a block share a
switch or a link. The rules:

1. A power of two is one block if a block is free. It is cut out of the smallest free block that is large enough; of equal blocks,
   the first.
2. Any other number, or a power of two that no free block can hold, is made of as few of the largest blocks as possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

LARGEST: Final = 8
"""Cells of the largest block."""


def whole_blocks(free: Sequence[int]) -> list[tuple[int, int]]:
    """Return the largest free blocks as (size, first cell), in ascending order of cells; together they are all of `free`."""
    there = frozenset(free)  # only asked for membership
    blocks = []
    at = 0
    while at < len(free):
        first, size = free[at], 1
        while size < LARGEST and first % (2 * size) == 0 and all(first + more in there for more in range(size, 2 * size)):
            size *= 2
        blocks.append((size, first))
        at += size
    return blocks


def take(free: Sequence[int], count: int) -> tuple[int, ...]:
    """Return `count` of the ascending ids in `free`, ascending.

    Raises `ValueError` where there are not as many.
    """
    if count > len(free):
        raise ValueError(f"{count} cells wanted, {len(free)} free")
    blocks = whole_blocks(free)
    taken: list[int] = []
    while len(taken) < count:
        left = count - len(taken)
        piece = min(1 << left.bit_length() - 1, max(size for size, _ in blocks))
        size, first = min(block for block in blocks if block[0] >= piece)
        blocks.remove((size, first))
        taken += range(first, first + piece)
        while size > piece:  # the other half stays free, down to the piece
            size //= 2
            blocks.append((size, first + size))
    return tuple(sorted(taken))
