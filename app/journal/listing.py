"""Lists of actions and environments by filters, a page at a time.

What has not ended comes from the partial indexes of unfinished rows. What has ended is bounded by time, so that a filter that matches
little does not read years: `within_s` back from now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import ColumnElement, Connection, and_, case, or_, select

from app.journal.models import RUNNING, Action, AnyRow, Environment, table
from scheduler.model.lifecycle import ACTION, ENVIRONMENT

PAGE: Final = 50
"""Rows of one page."""

ACTIVE: Final = ("waiting", "running")
ACTION_STATES: Final = (*ACTIVE, *ACTION.ends)
ENVIRONMENT_STATES: Final = ENVIRONMENT.states


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionFilter:
    """Which actions: empty words match all. `state` may be `active` or a state, `q` is looked for in ids, names and reasons."""

    job: str = ""
    kind: str = ""
    state: str = ""
    fault: str = ""
    node: str = ""
    service: str = ""
    environment: str = ""
    trajectory: str = ""
    q: str = ""
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


def list_actions(connection: Connection, wanted: ActionFilter, page: int, now: float) -> Listed:
    """Return page `page`, from 0, of the actions: those that have not ended first, oldest first, then the latest that ended."""
    narrow = _narrow(wanted)
    start, room = page * PAGE, PAGE + 1
    rows: list[AnyRow] = []
    if wanted.state in ("", "active", *ACTIVE):
        unended = [Action.ended_at.is_(None), *narrow]
        if wanted.state in ACTIVE:
            unended.append(Action.status == wanted.state)
        rows += connection.execute(select(*_SHOWN).where(*unended).order_by(Action.position).offset(start).limit(room)).all()
        if wanted.state == "" and len(rows) < room:
            start = max(0, start - _count(connection, unended))
    if wanted.state not in ("active", *ACTIVE) and len(rows) < room:
        ended = [Action.ended_at.is_not(None), Action.ended_at > now - wanted.within_s, *narrow]
        if wanted.state:
            ended.append(Action.status == wanted.state)
        query = select(*_SHOWN).where(*ended).order_by(Action.ended_at.desc(), Action.id).offset(start).limit(room - len(rows))
        rows += connection.execute(query).all()
    return Listed(rows=rows[:PAGE], more=len(rows) > PAGE)


def _count(connection: Connection, where: Sequence[ColumnElement[bool]]) -> int:
    # Ids alone are read, which is only done on the page where the unfinished ones end.
    return len(connection.execute(select(Action.id).where(*where)).all())


def _narrow(wanted: ActionFilter) -> list[ColumnElement[bool]]:
    columns = {
        Action.job: wanted.job,
        Action.kind: wanted.kind,
        Action.fault: wanted.fault,
        Action.node: wanted.node,
        Action.service: wanted.service,
        Action.environment: wanted.environment,
        Action.trajectory: wanted.trajectory,
    }
    narrow: list[ColumnElement[bool]] = [column == value for column, value in columns.items() if value]
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
