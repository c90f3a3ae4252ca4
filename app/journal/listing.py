"""Lists of actions and environments by filters, a page at a time.

What has not ended comes from the partial indexes of unfinished rows. What has ended is bounded by time, so that a filter that matches
little does not read years: `within_s` back from now.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, and_, case, func, or_, select, union_all

from app.journal.models import RUNNING, Action, AnyRow, Environment, Job, Node, Service, table
from scheduler.model.lifecycle import ACTION, ENVIRONMENT

PAGE: Final = 50
"""Rows of one page."""

ACTIVE: Final = ("waiting", "running")
ACTION_STATES: Final = (*ACTIVE, *ACTION.ends)
ENVIRONMENT_STATES: Final = ENVIRONMENT.states


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionFilter:
    """Which actions: empty words match all. `state` may be `active` or a state, `q` is looked for in ids, names and reasons.

    `sort` is a word of `ORDERS`, after `-` for the largest first.
    """

    job: str = ""
    kind: str = ""
    state: str = ""
    fault: str = ""
    node: str = ""
    service: str = ""
    environment: str = ""
    trajectory: str = ""
    q: str = ""
    sort: str = ""
    within_s: float = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """Rows of a page, and whether there are further ones."""

    rows: Sequence[AnyRow]
    more: bool


NOW_HELD: Final = (
    case((Action.status == RUNNING, Action.units)).label("units_now"),
    case((Action.status == RUNNING, Action.background)).label("in_background"),
)
"""The units that an action holds now, and whether it runs without a core of its own; nothing for one that does not run."""

_SHOWN = (
    Action.id,
    Action.job,
    Action.trajectory,
    Action.environment,
    Action.kind,
    Action.action_class,
    Action.service,
    Action.quota,
    Action.status,
    Action.reason,
    Action.fault,
    Action.cause,
    Action.node,
    Action.units,
    Action.submitted_at,
    Action.granted_at,
    Action.ended_at,
    Action.queue_s,
    Action.execution_s,
    Action.act_s,
    *NOW_HELD,
)


ORDERS: Final = {
    "state": "status",
    "kind": "kind",
    "job": "job",
    "trajectory": "trajectory",
    "node": "node",
    "submitted": "submitted_at",
    "act": "act_s",
}
"""What actions can be sorted by, and the column."""


def list_actions(connection: Connection, wanted: ActionFilter, page: int, now: float) -> Listed:
    """Return page `page`, from 0, of the actions: those that have not ended first, oldest first, then the latest that ended.

    With another order, all are sorted.
    """
    start, room = page * PAGE, PAGE + 1
    rows: list[AnyRow] = []
    groups = tuple(_matching(wanted, now))
    if wanted.sort:
        found = union_all(*(select(*_SHOWN).where(*where) for where, _ in groups)).subquery()
        column = found.c[ORDERS[wanted.sort.removeprefix("-")]]
        order = column.desc().nulls_last() if wanted.sort.startswith("-") else column.nulls_last()
        rows += connection.execute(select(found).order_by(order, found.c.id).offset(start).limit(room)).all()
        return Listed(rows=rows[:PAGE], more=len(rows) > PAGE)
    for number, (where, order_by) in enumerate(groups):
        if number and start:
            # Ids alone are read, which is only done on the page where the unfinished ones end.
            start = max(0, start - len(connection.execute(select(Action.id).where(*groups[0][0])).all()))
        rows += connection.execute(select(*_SHOWN).where(*where).order_by(*order_by).offset(start).limit(room - len(rows))).all()
        if len(rows) == room:
            break
    return Listed(rows=rows[:PAGE], more=len(rows) > PAGE)


def count_actions(connection: Connection, wanted: ActionFilter, now: float) -> int:
    """Return how many actions match."""
    counts = (select(func.count()).select_from(table(Action)).where(*where) for where, _ in _matching(wanted, now))
    return sum(connection.execute(count).scalar_one() for count in counts)


def _matching(wanted: ActionFilter, now: float) -> Iterator[tuple[list[ColumnElement[bool]], tuple[Any, ...]]]:
    """Yield conditions and order of the unfinished actions and of the ended ones, as far as they match: each has an index."""
    narrow = _narrow(wanted)
    if wanted.state not in ("", "active"):
        narrow.append(Action.status == wanted.state)
    if wanted.state in ("", "active", *ACTIVE):
        yield [Action.ended_at.is_(None), *narrow], (Action.position,)
    if wanted.state not in ("active", *ACTIVE):
        ended = [Action.ended_at.is_not(None), Action.ended_at > now - wanted.within_s]
        yield [*ended, *narrow], (Action.ended_at.desc(), Action.id)


def known_jobs(connection: Connection, most: int = 200) -> list[str]:
    """Return the names of the jobs that came last, in order."""
    return sorted(connection.execute(select(Job.name).order_by(Job.first_seen_at.desc()).limit(most)).scalars())


def sort_of(connection: Connection, name: str) -> str:
    """Return what is called `name` in full: `action`, `environment`, `job`, `node`, `service` or `trajectory`; empty for nothing."""
    columns = {
        "action": Action.id,
        "environment": Environment.id,
        "job": Job.name,
        "node": Node.name,
        "service": Service.name,
        "trajectory": Action.trajectory,
    }
    found = (sort for sort, column in columns.items() if connection.execute(select(column).where(column == name).limit(1)).first())
    return next(found, "")


_EQUAL: Final = ("job", "kind", "fault", "node", "service", "environment", "trajectory")
"""The words of a filter that an action's columns of these names must equal."""


def _narrow(wanted: ActionFilter) -> list[ColumnElement[bool]]:
    narrow: list[ColumnElement[bool]] = [getattr(Action, name) == value for name in _EQUAL if (value := getattr(wanted, name))]
    if wanted.q:
        texts = (Action.id, Action.trajectory, Action.environment, Action.action_class, Action.reason)
        narrow.append(or_(*(text.icontains(wanted.q, autoescape=True) for text in texts)))
    return narrow


def list_environments(connection: Connection, job: str, state: str, q: str, page: int, now: float, within_s: float = 3600.0) -> Listed:
    """Return page `page` of the environments: those that stand, and those that ended within the time."""
    where: list[ColumnElement[bool]] = [or_(Environment.ended_at.is_(None), Environment.ended_at > now - within_s)]
    if state:
        where.append(Environment.state == state)
    if job:
        where.append(Environment.job == job)
    if q:
        texts = (Environment.id, Environment.trajectory, Environment.node, Environment.client)
        where.append(or_(*(text.icontains(q, autoescape=True) for text in texts)))
    order = (Environment.ended_at.is_not(None), Environment.created_at.desc(), Environment.id)
    rows = connection.execute(select(table(Environment)).where(and_(*where)).order_by(*order).offset(page * PAGE).limit(PAGE + 1)).all()
    return Listed(rows=rows[:PAGE], more=len(rows) > PAGE)
