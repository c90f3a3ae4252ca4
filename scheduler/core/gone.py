"""Environments that are gone, kept so that a later action on one is told how it ended.

As many are kept as `REMEMBERED` says, of each of the two ends: environments that are closed all the time do not push out the few that
were lost.
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
        """Remember an environment; what was known of an earlier one of the same id is forgotten."""
        for known in (self._lost, self._closed):
            known.pop(gone.id, None)
        kept = self._lost if gone.state == "lost" else self._closed
        kept[gone.id] = gone
        if len(kept) > REMEMBERED:
            kept.popitem(last=False)

    def get(self, environment_id: str) -> EnvironmentGone | None:
        """Return how an environment ended; None where it never was, or ended too long ago."""
        return self._lost.get(environment_id) or self._closed.get(environment_id)
