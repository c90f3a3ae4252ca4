"""The timeline: which action held which cores and cells of a node, when.

A *bar* is one grant. `Lanes` keeps the bars of the last `WINDOW_S` seconds in memory. Each look adds what has changed, and each change has
a version. A viewer who has seen version n asks for what came after it. A bar shows the cores that its action held last: the journal does
not keep the ones before a resize. So a bar says since when it lies on these cores for sure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

from sqlalchemy import Connection, select

from app.journal.models import Action, Grant
from app.journal.overview import Held, Present, lanes_of
from tangram.action import CELLS, CORES

WINDOW_S: Final = 120.0
MOST_ENDED: Final = 6000
"""Ended bars that are kept; with more, the oldest go first."""

_LATE_S: Final = 5.0
"""How much later than its end an action may be committed and still be seen."""


@dataclass(frozen=True, slots=True)
class Bar:
    """An action on lanes of a node, since `sure` on these lanes and not on others; `end` is absent while it holds them."""

    key: str
    action: str
    node: str
    resource: str
    lanes: tuple[int, ...]
    start: float
    sure: float
    end: float | None
    job: str
    kind: str
    status: str
    fault: str = ""

    def document(self, origin: float) -> list[Any]:
        """Return what the page draws: times in whole milliseconds since `origin`, cells as negative numbers from -1 on."""
        lanes = [-1 - lane for lane in self.lanes] if self.resource == CELLS else list(self.lanes)
        end = None if self.end is None else round((self.end - origin) * 1000)
        start, sure = round((self.start - origin) * 1000), round((self.sure - origin) * 1000)
        return [self.key, self.node, lanes, start, end, self.job, self.kind, self.status, self.action, sure, self.fault]


class Lanes:
    """The bars of all nodes. For one thread at a time."""

    def __init__(self, origin: float) -> None:
        self.origin = origin
        self.version = 0
        self._bars: dict[str, tuple[int, Bar]] = {}
        self._read_to = origin - WINDOW_S
        self.nodes: list[list[Any]] = []

    def read(self, connection: Connection, present: Present) -> None:
        """Take in what has changed."""
        self.version += 1
        ended = list(self._ended(connection, present.at))
        gone = {bar.key for bar in ended}
        running = {bar.key: bar for one in present.held if one.lanes and (bar := _bar(one)).key not in gone}
        # What is neither running any more nor found among the ended has lost its cores: it went to the background, or waits again.
        for key, (_, bar) in list(self._bars.items()):
            if bar.end is None and key not in running and key not in gone:
                self._put(replace(bar, end=present.at, status="released"))
        for bar in (*running.values(), *ended):
            self._put(bar)
        self._forget(present.at)
        self.nodes = [[node.name, *lanes_of(node.description)] for node in present.nodes if node.state not in ("lost", "left")]

    def since(self, version: int) -> dict[str, Any]:
        """Return the bars that changed after `version`; all of them, with `whole` set, where that is 0 or of another process."""
        whole = version <= 0 or version > self.version
        bars = [bar.document(self.origin) for changed, bar in self._bars.values() if whole or changed > version]
        said = {"version": self.version, "whole": whole, "origin": self.origin, "at": self._read_to, "window_s": WINDOW_S}
        return {**said, "nodes": self.nodes, "bars": bars}

    def _put(self, bar: Bar) -> None:
        known = self._bars.get(bar.key)
        if known is None or known[1] != bar:
            self._bars.pop(bar.key, None)
            self._bars[bar.key] = (self.version, bar)

    def _forget(self, now: float) -> None:
        ended = [key for key, (_, bar) in self._bars.items() if bar.end is not None]
        over = len(ended) - MOST_ENDED
        for at, key in enumerate(ended):
            end = self._bars[key][1].end
            if at < over or (end is not None and end < now - WINDOW_S):
                del self._bars[key]

    def _ended(self, connection: Connection, now: float) -> Iterable[Bar]:
        grant = (Grant.action == Action.id) & Grant.resource.in_((CORES, CELLS))
        columns = (Action.id, Grant.attempt, Grant.node, Grant.resource, Grant.core_ids, Grant.cell_ids, Grant.granted_at)
        query = select(
            *columns, Grant.resized_at, Grant.released_at, Action.ended_at, Action.job, Action.kind, Action.status, Action.fault
        ).join_from(Action, Grant, grant)
        late = (Action.ended_at.is_not(None), Action.ended_at > max(now - WINDOW_S, self._read_to - _LATE_S))
        for row in connection.execute(query.where(*late).order_by(Action.ended_at.desc()).limit(MOST_ENDED)):
            lanes = tuple(row.cell_ids or row.core_ids)
            if lanes:
                end = row.released_at or row.ended_at
                key = f"{row.id}:{row.attempt}" if row.attempt > 1 else row.id
                sure = row.resized_at or row.granted_at
                yield Bar(key, row.id, row.node, row.resource, lanes, row.granted_at, sure, end, row.job, row.kind, row.status, row.fault)
        # Only now: after a look that failed, the next one reads what this one should have.
        self._read_to = now


def _bar(one: Held) -> Bar:
    sure = one.resized_at or one.since
    return Bar(one.key, one.id, one.node, one.resource, one.lanes, one.since, sure, None, one.job, one.kind, "running")
