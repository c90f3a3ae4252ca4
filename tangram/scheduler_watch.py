"""Whether a scheduler leads: workers and clients log when none has shown itself for a while.

Where no scheduler leads, nodes get nothing to do and clients no results. That looks as if there were nothing to do.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from redis import Redis

from tangram.wire import LOAD_KEY, SHARDS_KEY, of_shard

MISSED_S: Final = 30.0
"""The time without a scheduler after which that is logged: several times what a standby takes to lead."""

log = logging.getLogger(__name__)


class SchedulerWatch:
    """Logs when no scheduler of a shard has shown itself for a while, and when one does again."""

    def __init__(self, shard: int, shards: int, every_s: float, meanwhile: str) -> None:
        """Expect a look every so many seconds. `meanwhile` says in the log what no scheduler means there."""
        self._key = of_shard(LOAD_KEY, shard) if shards > 1 else SHARDS_KEY
        self._of = f" shard {shard} of {shards}" if shards > 1 else ""
        self._most, self._meanwhile = max(1, round(MISSED_S / every_s)), meanwhile
        self._missed = 0
        """Looks in a row that found no scheduler. Time in which the store is away, or this process stands still, does not count."""

    def look(self, store: Redis) -> None:
        """Look whether a scheduler shows itself. Raises what redis-py raises."""
        shown: Any = store.get(self._key)
        self.saw(shown is not None and (self._key != SHARDS_KEY or int(shown) == 1))

    def saw(self, leads: bool) -> None:
        """Take in whether a scheduler shows itself."""
        if leads and self._missed >= self._most:
            log.warning("a scheduler leads%s now", self._of)
        self._missed = 0 if leads else self._missed + 1
        if self._missed == self._most:
            log.warning("no scheduler leads%s: %s until one does", self._of, self._meanwhile)
