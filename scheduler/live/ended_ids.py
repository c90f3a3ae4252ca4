"""The ids of actions that have ended, remembered so that a message that comes again runs no action a second time.

Publishers and brokers repeat a message within minutes. Of actions that ended longer ago only the journal knows.
"""

from __future__ import annotations

from typing import Final

REMEMBERED: Final = 50_000


class EndedIds:
    """The ids of the last `REMEMBERED` actions that have ended, and of up to as many before them.

    It keeps their hashes, which take half of the memory of the ids. One of 10^14 other ids has the hash of one of these.
    """

    def __init__(self) -> None:
        self._hashes: set[int] = set()
        self._before: set[int] = set()

    def add(self, action_id: str) -> None:
        """Remember an id."""
        if len(self._hashes) >= REMEMBERED:
            self._before, self._hashes = self._hashes, set()
        self._hashes.add(hash(action_id))

    def __contains__(self, action_id: object) -> bool:
        return hash(action_id) in self._hashes or hash(action_id) in self._before
