"""Gone environments, remembered so that a later action on a gone environment gets the reason of the end.

`REMEMBERED` environments of each of the two ends are kept. So the many closed environments do not push out the few lost ones.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from scheduler.model.events import EnvironmentGone

REMEMBERED: Final = 20_000


class GoneEnvironments:
    """The latest environments that were closed or lost, by id."""

    def __init__(self) -> None:
        self._lost: OrderedDict[str, EnvironmentGone] = OrderedDict()
        self._closed: OrderedDict[str, EnvironmentGone] = OrderedDict()

    def add(self, gone: EnvironmentGone) -> None:
        """Remember an environment, and forget an earlier environment of the same id."""
        for known in (self._lost, self._closed):
            known.pop(gone.id, None)
        kept = self._lost if gone.state == "lost" else self._closed
        kept[gone.id] = gone
        if len(kept) > REMEMBERED:
            kept.popitem(last=False)

    def get(self, environment_id: str) -> EnvironmentGone | None:
        """Return how an environment ended; None if it never existed, or ended too long ago."""
        return self._lost.get(environment_id) or self._closed.get(environment_id)
