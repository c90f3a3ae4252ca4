"""Which worker process is behind a node's name.

Reports of a worker may come after those of the next worker of its node. A replaced scheduler that still lives may have taken them; then the
broker hands them out again, up to 10 s later. They say nothing of the node any more.

A new scheduler knows of the next worker by the journal alone, and may take the earlier one for a later one. So a worker that goes on
reporting for longer than that is believed.
"""

from __future__ import annotations

from math import inf
from typing import Final

MOST: Final = 10_000
"""Workers that are over and still known. A rolling restart of a large cluster fits in."""
REMEMBERED_S: Final = 30.0
"""For how long they are: the broker hands out again within less."""


class Incarnations:
    """The incarnation of each node's worker, and those that are over: they have left, or another worker of the same name came later."""

    def __init__(self) -> None:
        self.current: dict[str, str] = {}
        self._over: dict[tuple[str, str], float] = {}

    def follow(self, name: str, incarnation: str, now: float) -> None:
        """Take note of the worker that is behind a name from now on."""
        before = self.current.get(name, incarnation)
        if before != incarnation:
            self.end(name, before, now)
        self.current[name] = incarnation

    def end(self, name: str, incarnation: str, now: float) -> None:
        """Take note that a worker is over."""
        self._over[name, incarnation] = now
        if len(self._over) > MOST:
            del self._over[next(iter(self._over))]

    def is_over(self, name: str, incarnation: str, now: float) -> bool:
        """Return whether a worker is over. One that names no incarnation never is."""
        return incarnation != "" and abs(now - self._over.get((name, incarnation), inf)) < REMEMBERED_S
