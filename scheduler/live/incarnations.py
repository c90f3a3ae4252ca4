"""Which worker process is behind a node's name.

Reports of a worker may come after those of the next worker of its node. A replaced scheduler that still lives may have taken them; then the
broker hands them out again, up to 10 s later. They say nothing of the node any more.
"""

from __future__ import annotations

from typing import Final

REMEMBERED: Final = 10_000
"""Workers that are over and still known. A rolling restart of a large cluster fits in."""


class Incarnations:
    """The incarnation of each node's worker, and those that are over: they have left, or another worker of the same name came later."""

    def __init__(self) -> None:
        self.now: dict[str, str] = {}
        self._over: dict[tuple[str, str], None] = {}

    def follow(self, name: str, incarnation: str) -> None:
        """Take note of the worker that is behind a name from now on."""
        before = self.now.get(name, incarnation)
        if before != incarnation:
            self.end(name, before)
        self.now[name] = incarnation

    def end(self, name: str, incarnation: str) -> None:
        """Take note that a worker is over."""
        self._over[name, incarnation] = None
        if len(self._over) > REMEMBERED:
            del self._over[next(iter(self._over))]

    def are_over(self, name: str, incarnation: str) -> bool:
        """Return whether a worker is over. Workers that name no incarnation never are."""
        return incarnation != "" and (name, incarnation) in self._over
