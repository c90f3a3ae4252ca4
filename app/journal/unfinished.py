"""What a scheduler that begins reads from the journal: all that had not ended, and what ended so lately that it may come again."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, select

from app.journal.models import (
    DECLARED,
    RUNNING,
    Action,
    Environment,
    FailedMessage,
    Grant,
    Message,
    Node,
    header_of,
    table,
)
from scheduler.core.gone import REMEMBERED
from scheduler.live.entries import (
    ActionGranted,
    EnvironmentChanged,
    NodeChanged,
    SetAside,
    SpentAction,
    Unfinished,
    UnfinishedAction,
    UnpublishedEnd,
)
from scheduler.live.poison import FAILURES_ALLOWED
from scheduler.model.events import EnvironmentGone
from scheduler.model.lifecycle import ENVIRONMENT, NODE_HELD
from tangram import clock

# Enough to know any message that comes again: publishers and brokers repeat theirs within minutes.
ENDS_LOADED, ENDS_LOADED_S = 100_000, 3600.0

SPENT_LOADED_S = 120.0
"""How far back what ended actions took of quotas still counts: rates are per second and per minute."""


def set_aside(connection: Connection) -> tuple[SetAside, ...]:
    """Return the messages that the core is not given again, the latest first."""
    kept = select(table(FailedMessage)).where(FailedMessage.failures > FAILURES_ALLOWED).order_by(FailedMessage.failed_at.desc())
    return tuple(
        SetAside(
            message=row.message,
            kind=row.kind,
            action=row.action,
            failures=row.failures,
            error=next((line for line in reversed(row.traceback.splitlines()) if line.strip()), ""),
            failed_at=row.failed_at,
        )
        for row in connection.execute(kept)
    )


def load_unfinished(connection: Connection) -> Unfinished:
    """Return all that a scheduler goes on with."""
    held = (Grant.action == Action.id) & (Grant.attempt == Action.attempts) & Grant.released_at.is_(None) & (Action.status == RUNNING)
    actions = (
        select(Action.id, *DECLARED, Message.message, Action.submitted_at, Action.received_at, Action.attempts, *table(Grant).columns)
        .join_from(Action, Grant, held, isouter=True)
        .join(Message, Message.action == Action.id, isouter=True)
        .where(Action.ended_at.is_(None))
        .order_by(Action.position)
    )
    environments = select(table(Environment)).where(Environment.ended_at.is_(None)).order_by(Environment.created_at, Environment.id)
    # An environment's pod is what its opening was granted.
    opened = (Action.kind == "cpu.open") & (Action.environment == Environment.id) & (Action.status == "succeeded")
    pods = (
        select(Environment.id, Grant.core_ids)
        .join_from(Environment, Action, opened & (Action.trajectory == Environment.trajectory) & (Action.job == Environment.job))
        .join(Grant, (Grant.action == Action.id) & (Grant.attempt == Action.attempts))
        .where(Environment.ended_at.is_(None), Environment.pod_cores > 0)
        .order_by(Action.position)
    )
    nodes = select(table(Node)).where(Node.state.in_(NODE_HELD)).order_by(Node.joined_at, Node.name)
    draining = select(Node.name).where(Node.draining).order_by(Node.name)
    ended = select(Action.id).where(Action.ended_at > clock.time() - ENDS_LOADED_S).order_by(Action.ended_at.desc()).limit(ENDS_LOADED)
    gone = [
        select(Environment.id, Environment.state, Environment.node, Environment.reason, Environment.ended_at, Environment.cause)
        .where(Environment.ended_at > clock.time() - ENDS_LOADED_S, Environment.state == state)
        .order_by(Environment.ended_at.desc())
        .limit(REMEMBERED)
        for state in ENVIRONMENT.ends
    ]
    lost = (Environment.id == Action.environment) & (Environment.state == "lost") & (Action.status == "lost")
    unpublished = (
        select(Action.id, Message.message, Action.status, Action.reason, Action.cause, Environment.node)
        .join_from(Message, Action, Message.action == Action.id)
        .join(Environment, lost, isouter=True)
        .where(Action.ended_at > clock.time() - ENDS_LOADED_S)
        .order_by(Action.ended_at, Action.position)
    )
    since = clock.time() - SPENT_LOADED_S
    spent = (
        select(*DECLARED, Action.granted_at)
        .where(Action.ended_at > since, Action.granted_at > since, Action.quota.is_not(None))
        .order_by(Action.granted_at)
    )
    return Unfinished(
        actions=[_unfinished_action(row) for row in connection.execute(actions)],
        environments=[
            EnvironmentChanged(
                id=row.id,
                state=row.state,
                node=row.node,
                job=row.job,
                trajectory=row.trajectory,
                memory_mb=row.memory_mb,
                pod_cores=row.pod_cores,
                at=row.changed_at,
                reason=row.reason,
                client=row.client or "",
                used_at=row.used_at,
                cause=row.cause,
                owner=row.owner,
                ends_at=row.ends_at,
            )
            for row in connection.execute(environments)
        ],
        nodes=[
            NodeChanged(name=row.name, state=row.state, description=row.description, at=row.changed_at, reason=row.reason)
            for row in connection.execute(nodes)
        ],
        ended=tuple(connection.execute(ended).scalars().all()[::-1]),
        spent=tuple(SpentAction(header=header_of(row), granted_at=row.granted_at) for row in connection.execute(spent)),
        unpublished=tuple(
            UnpublishedEnd(
                id=row.id,
                message=row.message,
                status=row.status,
                reason=row.reason,
                environment_lost_on=row.node or "",
                cause=row.cause,
            )
            for row in connection.execute(unpublished)
        ),
        gone=tuple(
            EnvironmentGone(id=row.id, state=row.state, node=row.node or "", reason=row.reason, at=row.ended_at, cause=row.cause)
            for query in gone
            for row in connection.execute(query).all()[::-1]
        ),
        draining=tuple(connection.execute(draining).scalars()),
        set_aside=set_aside(connection),
        pods={row.id: tuple(row.core_ids) for row in connection.execute(pods)},
    )


def _unfinished_action(row: Row[Any]) -> UnfinishedAction:
    grant = None
    if row.attempt is not None:
        grant = ActionGranted(
            id=row.id,
            attempt=row.attempt,
            node=row.node,
            units=row.units,
            core_ids=tuple(row.core_ids),
            cell_ids=tuple(row.cell_ids),
            granted_at=row.granted_at,
            background=row.background,
        )
    return UnfinishedAction(
        id=row.id,
        header=header_of(row),
        message=row.message,
        submitted_at=row.submitted_at,
        received_at=row.received_at,
        grant=grant,
        attempts=row.attempts,
        resized_at=row.resized_at,
    )
