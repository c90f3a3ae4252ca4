"""Label values that users choose, bounded: a metric may not grow with the number of jobs or of task names.

The first names count by themselves, and further ones together as `other`. A job that has had no action for `IDLE_S` gives its place to
another one, and its figures go with it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

OTHER: Final = "other"
NAMELESS: Final = "unknown"

IDLE_S: Final = 3600.0
"""How long a job must have been without any action before another one takes its place."""

MOST_KINDS: Final = 50
"""Kinds of actions that count by themselves: those of the system, and tasks that users declare."""

LONGEST: Final = 100
"""Characters of a name that are shown."""


class Jobs:
    """The jobs that count by themselves. `forget` is told when one gives its place up."""

    def __init__(self, most: int, forget: Callable[[str], None]) -> None:
        self._most = most
        self._forget = forget
        self._unfinished: OrderedDict[str, int] = OrderedDict()
        self._used_at: dict[str, float] = {}

    def enter(self, name: str, now: float) -> str:
        """Return the label of a job that has one more unfinished action; `leave` takes that label back.

        `now` is a time of the scheduler, never of a trainer.
        """
        label = name[:LONGEST] or NAMELESS
        if label not in self._unfinished and not self._make_room(now):
            return OTHER
        self._unfinished[label] = self._unfinished.get(label, 0) + 1
        self._use(label, now)
        return label

    def leave(self, label: str, now: float) -> None:
        """Note that an action of a job has ended."""
        if label in self._unfinished:
            self._unfinished[label] -= 1
            self._use(label, now)

    def leave_all(self) -> None:
        """Note that no action of any job is ours any more. The jobs keep their places, as their figures stay."""
        self._unfinished = OrderedDict.fromkeys(self._unfinished, 0)

    def _use(self, label: str, now: float) -> None:
        self._unfinished.move_to_end(label)
        self._used_at[label] = now

    def _make_room(self, now: float) -> bool:
        if len(self._unfinished) < self._most:
            return True
        for label, unfinished in self._unfinished.items():
            if now - self._used_at[label] < IDLE_S:
                return False  # those after it were used later, or taken over since
            if not unfinished:
                del self._unfinished[label], self._used_at[label]
                self._forget(label)
                return True
        return False


class Names:
    """The first names that come count by themselves, for good."""

    def __init__(self) -> None:
        self._known: dict[str, None] = {}

    def label(self, name: str) -> str:
        """Return the label of a name."""
        name = name[:LONGEST] or NAMELESS
        if name not in self._known:
            if len(self._known) >= MOST_KINDS:
                return OTHER
            self._known[name] = None
        return name
