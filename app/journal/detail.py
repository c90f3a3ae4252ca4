"""One action, job, environment, service or node: what the pages about it show.

Every function returns None where the journal does not know the thing. Rows are those of the tables in `models.py`.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select

from app.journal.listing import NOW_HELD, ActionFilter, list_actions
from app.journal.models import RUNNING, Action, AnyRow, Environment, Grant, Job, Message, Node, Service, ServiceInstance, table
from app.journal.recent import INFRASTRUCTURE, Recent, Tally
from app.journal.waits import Fact, explain

LONGEST_COMMAND = 4000
LONGEST_SHOWN = 160
"""Characters of a command in a list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A moment on the way of an action."""

    at: float
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionDetail:
    """An action; `arguments` are those that its message shows, cut short, as long as the journal keeps the message."""

    row: AnyRow
    arguments: str
    way: tuple[Step, ...]
    grants: Sequence[AnyRow]
    waits: tuple[Fact, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDetail:
    """A job: how its actions of the last hour ended, by kind and in all, and the latest failures that were not its own."""

    name: str
    total: Tally
    kinds: Mapping[str, Tally]
    active: Sequence[AnyRow]
    more_active: bool
    failures: Sequence[AnyRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentDetail:
    """An environment with its actions, the unfinished ones first; `is_used` says whether one runs."""

    row: AnyRow
    actions: Sequence[AnyRow]
    is_used: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceDetail:
    """A service: what nodes declare, its instances, and its actions that have not ended."""

    name: str
    declared: Mapping[str, Mapping[str, Any]]
    instances: Sequence[AnyRow]
    active: Sequence[AnyRow]
    more_active: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDetail:
    """A node: what runs and stands on it, and which of its actions failed lately without being at fault."""

    row: AnyRow
    running: Sequence[AnyRow]
    more_running: bool
    environments: Sequence[AnyRow]
    instances: Sequence[AnyRow]
    failures: Sequence[AnyRow]


def action_detail(connection: Connection, action_id: str, scheduler: Mapping[str, Any] | None, now: float) -> ActionDetail | None:
    """Return an action."""
    query = select(table(Action), Message.message).join_from(Action, Message, Message.action == Action.id, isouter=True)
    row = connection.execute(query.where(Action.id == action_id)).one_or_none()
    if row is None:
        return None
    grants = connection.execute(select(table(Grant)).where(Grant.action == action_id).order_by(Grant.attempt)).all()
    return ActionDetail(
        row=row, arguments=_arguments(row.message), way=_way(row, grants), grants=grants, waits=explain(connection, row, scheduler, now)
    )


def commands_of(connection: Connection, ids: Sequence[str]) -> dict[str, str]:
    """Return what the journal has of the commands of actions: texts of those that failed, arguments of those that have not ended."""
    query = select(Action.id, Action.excerpt, Message.message).join_from(Action, Message, Message.action == Action.id, isouter=True)
    rows = connection.execute(query.where(Action.id.in_(ids)))
    return {row.id: (row.excerpt["command"] if row.excerpt else _command(row.message))[:LONGEST_SHOWN] for row in rows}


def _command(message: str | None) -> str:
    """Return the command among a message's arguments; empty where there is none, or where they were cut short in it."""
    try:
        shown = ast.literal_eval(_arguments(message))
    except (SyntaxError, ValueError):
        return ""
    return str(shown.get("command", "")) if isinstance(shown, dict) else ""


def _arguments(message: str | None) -> str:
    """Return what Flower would show of a Celery message's arguments (`tangram/publisher.py`)."""
    if not message:
        return ""
    try:
        shown = json.loads(message).get("headers", {}).get("kwargsrepr", "")
    except (ValueError, AttributeError):
        return ""
    return str(shown)[:LONGEST_COMMAND]


def _way(row: AnyRow, grants: Sequence[AnyRow]) -> tuple[Step, ...]:
    steps = [Step(at=row.submitted_at, what="submitted by its trainer"), Step(at=row.received_at, what="received by the scheduler")]
    for grant in grants:
        held = f"granted {_units(grant)}" if grant.resource else "granted"
        steps.append(Step(at=grant.granted_at, what=f"attempt {grant.attempt}: {held} on node {grant.node}"))
        if grant.resized_at is not None:
            how = "went to the background" if grant.background else f"was resized to {_units(grant)}"
            steps.append(Step(at=grant.resized_at, what=f"attempt {grant.attempt}: {how}, its latest change"))
        if grant.released_at is not None and grant.released_at != row.ended_at:
            steps.append(Step(at=grant.released_at, what=f"attempt {grant.attempt}: gave its grant back"))
    if row.started_at is not None:
        steps.append(Step(at=row.started_at, what="started by its worker"))
    if row.ended_at is not None:
        steps.append(Step(at=row.ended_at, what=f"ended: {row.status}"))
    return tuple(sorted(steps, key=lambda step: step.at))


def _units(grant: AnyRow) -> str:
    one = grant.resource.removesuffix("s")
    ids = ", ".join(map(str, grant.cell_ids or grant.core_ids))
    return f"{grant.units} {one}{'' if grant.units == 1 else 's'}{f' ({ids})' if ids else ''}"


def job_detail(connection: Connection, name: str, recent: Recent, now: float) -> JobDetail | None:
    """Return a job."""
    if connection.execute(select(Job.name).where(Job.name == name)).one_or_none() is None:
        return None
    total, kinds = Tally(), dict[str, Tally]()
    for ended in recent:
        if ended.job == name:
            total.add(ended)
            kinds.setdefault(ended.kind, Tally()).add(ended)
    active = list_actions(connection, ActionFilter(job=name, state="active"), 0, now)
    return JobDetail(
        name=name,
        total=total,
        kinds=dict(sorted(kinds.items())),
        active=active.rows,
        more_active=active.more,
        failures=_failures(connection, now, job=name),
    )


def _failures(connection: Connection, now: float, *, job: str = "", node: str = "") -> Sequence[AnyRow]:
    return list_actions(connection, ActionFilter(job=job, node=node, fault=INFRASTRUCTURE, state=""), 0, now).rows


def environment_detail(connection: Connection, environment_id: str) -> EnvironmentDetail | None:
    """Return an environment. Its actions are those of its trajectory that name it: that column has an index."""
    row = connection.execute(select(table(Environment)).where(Environment.id == environment_id)).one_or_none()
    if row is None:
        return None
    here = (Action.trajectory == row.trajectory, Action.environment == environment_id)
    newest = (Action.ended_at.is_not(None), Action.position.desc())
    actions = connection.execute(select(table(Action), *NOW_HELD).where(*here).order_by(*newest).limit(50)).all()
    running = select(Action.id).where(*here, Action.ended_at.is_(None), Action.status == RUNNING).limit(1)
    return EnvironmentDetail(row=row, actions=actions, is_used=connection.execute(running).first() is not None)


def service_detail(connection: Connection, name: str, now: float) -> ServiceDetail | None:
    """Return a service."""
    nodes = connection.execute(select(table(Node)).where(Node.state.not_in(("lost", "left"))).order_by(Node.name)).all()
    declared = {node.name: node.description["services"][name] for node in nodes if name in node.description.get("services", {})}
    instances = connection.execute(
        select(table(ServiceInstance)).where(ServiceInstance.service == name).order_by(ServiceInstance.node)
    ).all()
    known = connection.execute(select(Service.name).where(Service.name == name)).one_or_none()
    if not declared and not instances and known is None:
        return None
    active = list_actions(connection, ActionFilter(service=name, state="active"), 0, now)
    return ServiceDetail(name=name, declared=declared, instances=instances, active=active.rows, more_active=active.more)


def node_detail(connection: Connection, name: str, now: float) -> NodeDetail | None:
    """Return a node."""
    row = connection.execute(select(table(Node)).where(Node.name == name)).one_or_none()
    if row is None:
        return None
    running = list_actions(connection, ActionFilter(node=name, state="running"), 0, now)
    stand = select(table(Environment)).where(Environment.ended_at.is_(None), Environment.node == name).order_by(Environment.created_at)
    on_cells = select(table(ServiceInstance)).where(ServiceInstance.node == name).order_by(ServiceInstance.service, ServiceInstance.cells)
    return NodeDetail(
        row=row,
        running=running.rows,
        more_running=running.more,
        environments=connection.execute(stand.limit(50)).all(),
        instances=connection.execute(on_cells).all(),
        failures=_failures(connection, now, node=name),
    )
