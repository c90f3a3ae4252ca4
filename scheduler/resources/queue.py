"""The waiting actions of one group, in the policy's order."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterator

from scheduler.model import Waiting


class WaitQueue:
    """A list kept sorted by `Waiting.key`; keys are distinct, since each ends with the order of arrival."""

    def __init__(self) -> None:
        self._keys: list[tuple[float, ...]] = []
        self._items: list[Waiting] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._items)

    def add(self, waiting: Waiting) -> None:
        """Insert in order."""
        at = bisect_left(self._keys, waiting.key)
        self._keys.insert(at, waiting.key)
        self._items.insert(at, waiting)

    def remove(self, waiting: Waiting) -> bool:
        """Take out; False where it is not in this queue."""
        at = bisect_left(self._keys, waiting.key)
        if at == len(self._items) or self._items[at] is not waiting:
            return False
        del self._keys[at], self._items[at]
        return True


def merged(own: WaitQueue, floating: WaitQueue) -> Iterator[Waiting]:
    """Walk two queues in one order. Neither may change before the walk is over."""
    if not len(floating):
        return iter(own)
    if not len(own):
        return iter(floating)
    return heapq.merge(own, floating, key=lambda waiting: waiting.key)
