"""The ids of actions that have ended, remembered so that a message that comes again runs no action a second time.

Publishers and brokers repeat a message within minutes. Of actions that ended longer ago only the journal knows.
"""

from __future__ import annotations

from array import array
from typing import Final

REMEMBERED: Final = 50_000
SLOTS: Final = 2**17


class EndedIds:
    """The ids of the last `REMEMBERED` actions that have ended, and of up to as many before them.

    Two tables keep their hashes, in 1 MiB each whatever they hold. One of 10^14 other ids has the hash of one of these.
    """

    def __init__(self) -> None:
        self._hashes = self._before = array("q")
        self._count = REMEMBERED  # so the first id makes the first table

    def add(self, action_id: str) -> None:
        """Remember an id."""
        if self._count >= REMEMBERED:
            self._before, self._hashes, self._count = self._hashes, array("q", [0]) * SLOTS, 0
        found = _hash(action_id)
        slot = _slot(self._hashes, found)
        self._count += not self._hashes[slot]
        self._hashes[slot] = found

    def __contains__(self, action_id: object) -> bool:
        found = _hash(action_id)
        return any(table and table[_slot(table, found)] for table in (self._hashes, self._before))


def _hash(action_id: object) -> int:
    """Return an id's hash, which is not 0: a slot with 0 is free."""
    return hash(action_id) or 1


def _slot(table: array[int], wanted: int) -> int:
    """Return the slot that has this hash, or the free one where it belongs."""
    slot = wanted % SLOTS
    while table[slot] not in (0, wanted):
        slot = (slot + 1) % SLOTS
    return slot
