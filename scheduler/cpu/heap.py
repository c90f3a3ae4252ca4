"""A heap of items whose place changes. An entry bears the version that its item had; it counts as long as the item still has it.

Entries that no longer count leave from the top, and all at once when the heap has become twice as long as it was after the last time.
Otherwise those that never come to the top, as where cores are free, would keep ended actions in memory.
"""

from __future__ import annotations

import heapq
from typing import Any, Final, Generic, Protocol, TypeVar

GONE: Final = -1
"""The version of an item that is in no heap any more."""

SMALL: Final = 64
"""Length up to which nothing is removed from inside of a heap."""


class Versioned(Protocol):
    """An item: whoever changes what it is ordered by gives it another version, and pushes it again."""

    version: int


T = TypeVar("T", bound=Versioned)


class Heap(Generic[T]):
    """Entries `(*order, version, item)`; no two items with the same order have the same version."""

    __slots__ = ("_entries", "_limit")

    def __init__(self) -> None:
        self._entries: list[tuple[Any, ...]] = []
        self._limit = SMALL

    def push(self, item: T, *order: float) -> None:
        """Put an item in its place."""
        if len(self._entries) >= self._limit:
            self._entries = [entry for entry in self._entries if entry[-2] == entry[-1].version]
            heapq.heapify(self._entries)
            self._limit = max(SMALL, 2 * len(self._entries))
        heapq.heappush(self._entries, (*order, item.version, item))

    def first(self) -> tuple[Any, ...] | None:
        """Return the first entry that counts."""
        entries = self._entries
        while entries:
            first = entries[0]
            if first[-2] == first[-1].version:
                return first
            heapq.heappop(entries)
        return None

    def pop(self) -> T:
        """Take the entry off that `first` has returned."""
        item: T = heapq.heappop(self._entries)[-1]
        return item
