"""The search for the smallest size that meets a target, with as few questions as possible.

First a size that meets the target is *bracketed*, seed by seed, then the answer *settles* upwards from it (docs/planning.md). Only pure
functions live here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Meets = Callable[[Sequence[int]], list[bool]]
"""Says for each of some sizes whether it meets the target."""


def between(low: int, high: int, count: int) -> list[int]:
    """Return up to `count` sizes between two, neither of them included, at about equal ratios."""
    ratio = (high / max(low, 1)) ** (1 / (count + 1))
    points = {round(max(low, 1) * ratio ** (step + 1)) for step in range(count)}
    return sorted(point for point in points if low < point < high) or ([low + 1] if low + 1 < high else [])


def bracket(meets: Meets, low: int, high: int, at_once: int, first: Sequence[int] = ()) -> int:
    """Return a size up to `high`, which meets the target, whose predecessor does not.

    `low` does not meet it, as none does that is 0; `first` are the sizes to ask first, and `at_once` is how many are asked at a time.
    """
    points = sorted({point for point in first if low < point < high})
    while high - low > 1:
        points = points or between(low, high, at_once)
        verdicts = dict(zip(points, meets(points), strict=True))
        high = min([point for point, met in verdicts.items() if met], default=high)
        low = max([point for point, met in verdicts.items() if not met and point < high], default=low)
        points = []
    return high


def settle(meets: Meets, found: int, most: int) -> int | None:
    """Return the first size from `found` that meets the target and whose next one does so too; None where none does up to `most`.

    `most` needs no next one.
    """
    size = found
    while size <= most:
        this, after = meets([size, min(size + 1, most)])
        if this and after:
            return size
        size += 1 if after else 2
    return None


def knee(points: Sequence[tuple[int, float]], less: float = 0.1) -> int | None:
    """Return the fewest cores from which on more of them save little: a part p more lowers the ACT by less than `less` · p.

    `points` are pairs of cores and mean ACT, by cores. None where the curve never becomes so flat.
    """
    flat = None
    for (cores, act), (more, lower) in zip(reversed(points[:-1]), reversed(points[1:]), strict=True):
        if act <= 0 or (act - lower) / act > less * (more - cores) / cores:
            return flat
        flat = cores
    return flat
