"""What ended lately, by the minute: which jobs lose actions to failures of the infrastructure, and on which nodes.

`Recent` keeps the counts of whole minutes, so that a look reads the last two minutes only, however long its window is. An action is
committed a moment after its `ended_at`, which is why the minute before the present one is read again, too. After a time without looks,
the minutes that were not over at the last look are read again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import Connection, func, select

from app.journal.models import Action
from app.journal.rollup import PARTS
from scheduler.model.copied import filled

WINDOW_S: Final = 3600
"""Seconds back that `Recent` knows."""

_MINUTE_S: Final = 60
INFRASTRUCTURE: Final = "infrastructure"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Actions that ended alike, from `first` to `last`: `fault` says whose fault the end was, empty for none; seconds are sums."""

    job: str
    kind: str
    node: str
    status: str
    fault: str
    cause: str
    actions: int
    first: float
    last: float
    act_s: float
    queue_s: float
    background_s: float
    overhead_s: float
    execution_s: float

    @property
    def ours(self) -> bool:
        """Whether the infrastructure was at fault."""
        return self.fault == INFRASTRUCTURE


class Recent:
    """The ended actions of the last `WINDOW_S` seconds. One thread reads; others may walk it."""

    def __init__(self) -> None:
        self._minutes: dict[int, tuple[Ended, ...]] = {}
        self._last = 0
        """The minute of the last look."""

    def read(self, connection: Connection, now: float) -> None:
        """Bring the counts up to `now`."""
        present = int(now // _MINUTE_S)
        first = present - WINDOW_S // _MINUTE_S + 1
        whole = min(present, self._last) - 1
        minutes = {minute: ended for minute, ended in self._minutes.items() if first <= minute < whole}
        for minute in range(first, present + 1):
            if minute not in minutes:
                minutes[minute] = _ended_in(connection, minute * _MINUTE_S, (minute + 1) * _MINUTE_S)
        # Replaced as a whole: pages that are being rendered walk the counts before.
        self._minutes, self._last = minutes, present

    def __iter__(self) -> Iterator[Ended]:
        return (ended for groups in self._minutes.values() for ended in groups)


def _ended_in(connection: Connection, start: float, end: float) -> tuple[Ended, ...]:
    alike: tuple[Any, ...] = (Action.job, Action.kind, Action.node, Action.status, Action.fault, Action.cause)
    times = (func.min(Action.ended_at).label("first"), func.max(Action.ended_at).label("last"))
    sums = (func.count().label("actions"), *times, *(func.sum(getattr(Action, part)).label(part) for part in PARTS))
    query = select(*alike, *sums).where(Action.ended_at.is_not(None), Action.ended_at >= start, Action.ended_at < end).group_by(*alike)
    return tuple(
        filled(
            Ended,
            row,
            node=row.node or "",
            fault=row.fault or "",
            cause=row.cause or "",
            **{part: getattr(row, part) or 0.0 for part in PARTS},
        )
        for row in connection.execute(query)
    )


@dataclass(slots=True)
class Tally:
    """How actions of a group ended; `causes`, `ours_first` and `ours_last` are those of failures of the infrastructure."""

    ended: int = 0
    ours: int = 0
    program: int = 0
    caller: int = 0
    act_s: float = 0.0
    queue_s: float = 0.0
    background_s: float = 0.0
    overhead_s: float = 0.0
    execution_s: float = 0.0
    causes: Counter[str] = field(default_factory=Counter)
    ours_first: float | None = None
    ours_last: float | None = None

    def add(self, ended: Ended) -> None:
        """Count a group."""
        self.ended += ended.actions
        self.ours += ended.actions * ended.ours
        self.program += ended.actions * (ended.fault == "program")
        self.caller += ended.actions * (ended.fault == "caller")
        for part in PARTS:
            setattr(self, part, getattr(self, part) + getattr(ended, part))
        if ended.ours:
            self.causes[ended.cause] += ended.actions
            self.ours_first = min(ended.first, self.ours_first or ended.first)
            self.ours_last = max(ended.last, self.ours_last or ended.last)

    def document(self) -> dict[str, object]:
        """Return the counts as JSON has them; means are in seconds."""
        return {
            "ended": self.ended,
            "ours": self.ours,
            "program": self.program,
            "caller": self.caller,
            **{f"mean_{part.removesuffix('_s')}": getattr(self, part) / self.ended if self.ended else 0.0 for part in PARTS},
            "causes": dict(self.causes.most_common()),
            "ours_first": self.ours_first,
            "ours_last": self.ours_last,
        }
