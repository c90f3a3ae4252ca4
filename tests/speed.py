"""How fast this machine is now, for bounds that have to hold on a slow one as well.

Bounds on computing count CPU time, which other processes do not lengthen, and are multiplied by `slowness` or compared with what
something well known takes in the same test. Bounds on waiting are wide: they lie between what is right and what a hang would take.
"""

from __future__ import annotations

import gc
import heapq
import time
from collections.abc import Callable

REFERENCE_S = 0.007
"""CPU time of `_plain_python` on the machine on which the bounds were found."""


def cpu_s(run: Callable[[], object], tries: int = 3) -> float:
    """Return the least CPU time, in seconds, that `run` takes of this thread; what other tests left in memory is not collected in it."""
    gc.collect()
    gc.freeze()
    try:
        return min(_once(run) for _ in range(tries))
    finally:
        gc.unfreeze()


def slowness() -> float:
    """Return how many times as long Python takes as where the bounds were found, at least 1."""
    return max(1.0, cpu_s(_plain_python, 5) / REFERENCE_S)


def _once(run: Callable[[], object]) -> float:
    before = time.thread_time()
    run()
    return time.thread_time() - before


def _plain_python() -> None:
    heap: list[tuple[float, int]] = []
    seen: dict[int, float] = {}
    for number in range(10_000):
        value = (number * 7919 % 10_007) / 3.0
        seen[number] = value
        heapq.heappush(heap, (value, number))
    while heap:
        value, number = heapq.heappop(heap)
        seen[number] += value
