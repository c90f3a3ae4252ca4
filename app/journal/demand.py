"""How much was held, and how much was waited for, over the last hours: cores, GPU cells and the memory of environments.

The hours are cut into `SLOTS` slots. A slot has means over its time. An action waits for its units until it is granted, and holds what its
grants held. An environment waits for its limit until it is open. Some of what waits would fit beside what is held. So it waits for
something else. The rest is wanted *beyond* what is there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal

from sqlalchemy import Connection, and_, case, func, or_, select

from app.journal.models import WAITING, Action, Environment
from tangram.action import CELLS, CORES, MEMORY_MB

SLOTS: Final = 24
SORTS: Final = (CORES, CELLS, MEMORY_MB)


@dataclass(slots=True)
class Slot:
    """Means over the seconds from `start` to `end`, by `cores`, `cells` and `memory_mb`."""

    start: float
    end: float
    held: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SORTS, 0.0))
    waiting: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SORTS, 0.0))

    def beyond(self, sort: str, there: float) -> float:
        """Return what was wanted beyond what is there."""
        return max(0.0, min(self.waiting[sort], self.held[sort] + self.waiting[sort] - there))


_UNGRANTED = case((Action.kind == "cpu.exec", CORES), (Action.service.is_not(None), CELLS), else_="")
_SORT = case((Action.granted_at.is_(None), _UNGRANTED), else_=Action.resource)
_UNITS = func.coalesce(Action.units, 1)
_WAITED_S = func.coalesce(Action.granted_at, Action.ended_at) - Action.submitted_at


def demand(connection: Connection, hours: float, now: float) -> list[Slot]:
    """Return the slots, the latest last; it ends at `now`."""
    length = hours * 3600 / SLOTS
    first = (now // length - SLOTS + 1) * length
    slots = [Slot(first + at * length, min(now, first + (at + 1) * length)) for at in range(SLOTS) if first + at * length < now]
    for slot in slots:
        _add_ended(connection, slots, slot)
    columns = (Action.header, Action.status, Action.submitted_at, Action.granted_at, Action.resource, Action.units, Action.background)
    for row in connection.execute(select(*columns).where(Action.ended_at.is_(None))):
        _add_unended(slots, row, now)
    _add_environments(connection, slots, now)
    return slots


def _add(slots: list[Slot], what: Literal["held", "waiting"], sort: str, since: float, until: float, amount: float) -> None:
    """Count an amount that went on from `since` until `until` in the slots of that time."""
    if sort not in SORTS:
        return
    start, length = slots[0].start, slots[0].end - slots[0].start
    for slot in slots[max(0, int((since - start) / length)) : max(0, int((until - start) / length) + 1)]:
        shared_s = max(0.0, min(until, slot.end) - max(since, slot.start))
        (slot.held if what == "held" else slot.waiting)[sort] += amount * shared_s / (slot.end - slot.start)


def _add_ended(connection: Connection, slots: list[Slot], slot: Slot) -> None:
    ended = (Action.ended_at.is_not(None), Action.ended_at >= slot.start, Action.ended_at < slot.end)
    # Most actions begin and end in one slot. Their sums are enough, and the database makes them.
    sums = (func.sum(_UNITS * _WAITED_S).label("waited"), func.sum(Action.unit_s).label("held"))
    whole = select(_SORT.label("sort"), *sums).where(*ended, Action.submitted_at >= slot.start).group_by(_SORT)
    for row in connection.execute(whole):
        if row.sort in slot.held:
            slot.waiting[row.sort] += (row.waited or 0.0) / (slot.end - slot.start)
            slot.held[row.sort] += (row.held or 0.0) / (slot.end - slot.start)
    times = (Action.submitted_at, func.coalesce(Action.granted_at, Action.ended_at).label("granted_at"), Action.ended_at)
    others = select(_SORT.label("sort"), _UNITS.label("units"), Action.unit_s, *times).where(*ended, Action.submitted_at < slot.start)
    for row in connection.execute(others):
        held = (row.unit_s or 0.0) / max(1e-9, row.ended_at - row.granted_at)
        _add(slots, "waiting", row.sort, row.submitted_at, row.granted_at, row.units)
        _add(slots, "held", row.sort, row.granted_at, row.ended_at, held)


def _add_unended(slots: list[Slot], row: Any, now: float) -> None:
    cost = row.header.get("cost", {})
    waits = row.status == WAITING or row.granted_at is None
    sort = next((name for name in (CORES, CELLS) if name in cost), "") if waits else row.resource
    units, granted_at = (min(cost.get(sort, [0])), now) if waits else (row.units, row.granted_at)
    _add(slots, "waiting", sort, row.submitted_at, granted_at, units)
    # In the background it has nothing of its own: it waits for that.
    _add(slots, "waiting" if row.background else "held", sort, granted_at, now, units)


def _add_environments(connection: Connection, slots: list[Slot], now: float) -> None:
    columns = (Environment.memory_mb, Environment.created_at, Environment.opened_at, Environment.ended_at)
    late = and_(Environment.ended_at.is_not(None), Environment.ended_at >= slots[0].start)
    for row in connection.execute(select(*columns).where(or_(Environment.ended_at.is_(None), late))):
        ended_at = now if row.ended_at is None else row.ended_at
        opened_at = ended_at if row.opened_at is None else row.opened_at
        _add(slots, "waiting", MEMORY_MB, row.created_at, opened_at, row.memory_mb)
        _add(slots, "held", MEMORY_MB, opened_at, ended_at, row.memory_mb)
