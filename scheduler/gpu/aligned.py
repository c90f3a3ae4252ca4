"""Which free cells an instance gets: those of one aligned chunk, and such that large chunks stay whole.

The cells of a node are the leaves of trees of eight: a *chunk* of 2, 4 or 8 begins at a multiple of its size, as GPUs that
share a switch or a link do where a machine numbers them by place. The rules:

1. A power of two is one chunk where one is free. It is cut out of the smallest free chunk that is large enough, the first
   of those: what is cut up is never larger than it must be.
2. Anything else, and what no chunk is left for, is made of the largest chunks that there are, as few as possible.

Pure functions of ascending ids; nothing here knows who holds what.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

LARGEST: Final = 8
"""Cells of the largest chunk."""


def whole_chunks(free: Sequence[int]) -> list[tuple[int, int]]:
    """Return the largest free chunks as (size, first cell), in ascending order of cells; together they are all of `free`."""
    there = frozenset(free)  # only asked for membership
    chunks = []
    at = 0
    while at < len(free):
        first, size = free[at], 1
        while size < LARGEST and first % (2 * size) == 0 and all(first + more in there for more in range(size, 2 * size)):
            size *= 2
        chunks.append((size, first))
        at += size
    return chunks


def take(free: Sequence[int], count: int) -> tuple[int, ...]:
    """Return `count` of the ascending ids in `free`, ascending.

    Raises `ValueError` where there are not as many.
    """
    if count > len(free):
        raise ValueError(f"{count} cells wanted, {len(free)} free")
    chunks = whole_chunks(free)
    taken: list[int] = []
    while len(taken) < count:
        left = count - len(taken)
        piece = min(1 << left.bit_length() - 1, max(size for size, _ in chunks))
        size, first = min(chunk for chunk in chunks if chunk[0] >= piece)
        chunks.remove((size, first))
        taken += range(first, first + piece)
        while size > piece:  # its other half is free, and so on down to the piece
            size //= 2
            chunks.append((size, first + size))
    return tuple(sorted(taken))
