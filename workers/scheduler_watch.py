"""Whether somebody schedules a node: its worker logs when no scheduler of its shard has shown itself for a while, and when one does again.

Where no scheduler leads, a node gets nothing to do and hears nothing, as when there is nothing to do.
"""

from __future__ import annotations

import logging

from redis import Redis

from app.scheduler_document import SHOWN_TTL_S
from tangram.settings import Settings
from tangram.wire import LOAD_TTL_S, SCHEDULER_KEY, of_shard

log = logging.getLogger(__name__)

MISSED_S = 30.0
"""The time without a scheduler after which a worker says so: several times what a standby takes to lead."""


class SchedulerWatch:
    """Watches the scheduler of a node's shard; `look` is called with each beat."""

    def __init__(self, store: Redis, settings: Settings) -> None:
        self._store, self._key = store, of_shard(SCHEDULER_KEY, settings.shard)
        self._of = f" shard {settings.shard} of {settings.shards}" if settings.shards > 1 else ""
        self._most = max(1, round(MISSED_S / settings.beat_s))
        self._missed = 0
        """Looks in a row that found none. While the store is away, or this process stands still, there are none."""

    def look(self) -> None:
        """Look once. Raises what redis-py raises."""
        if self._store.pttl(self._key) > (SHOWN_TTL_S - LOAD_TTL_S) * 1000:
            if self._missed >= self._most:
                log.warning("a scheduler leads%s now", self._of)
            self._missed = 0
            return
        self._missed += 1
        if self._missed == self._most:
            log.warning("no scheduler leads%s: this node gets nothing to do until one does", self._of)
