"""What a new scheduler reads from the journal: all that has not ended, and the latest ends, since their messages may come again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, Row, select

from app.journal.folding import read_failure_key
from app.journal.models import (
    DECLARED,
    RUNNING,
    Action,
    Environment,
    FailedMessage,
    Message,
    Node,
    header_of,
    table,
)
from scheduler.core.gone_environments import REMEMBERED
from scheduler.live.entries import (
    EnvironmentChanged,
    NodeChanged,
    SetAside,
    SpentAction,
    Unfinished,
    UnfinishedAction,
    UnpublishedEnd,
)
from scheduler.live.poison import FAILURES_ALLOWED
from scheduler.model import Grant, GrantFacts
from scheduler.model.copied import filled, shared
from scheduler.model.events import EnvironmentGone
from scheduler.model.lifecycle import ENVIRONMENT, NODE_HELD
from tangram import clock

# Enough to know any message that comes again: publishers and brokers repeat theirs within minutes.
ENDS_LOADED, ENDS_LOADED_S = 100_000, 3600.0

AWAY_LOADED_S = 86_400.0
"""For how long a new scheduler knows the services of a node that is away, so that actions wait for them. A stop over a night is shorter."""

SPENT_LOADED_S = 120.0
"""How far back what ended actions took of quotas still counts: rates are per second and per minute."""


def set_aside(connection: Connection) -> tuple[SetAside, ...]:
    """Return the messages that the core is not given again, the latest first."""
    kept = select(table(FailedMessage)).where(FailedMessage.failures > FAILURES_ALLOWED).order_by(FailedMessage.failed_at.desc())
    return tuple(
        filled(SetAside, row, error=next((line for line in reversed(row.traceback.splitlines()) if line.strip()), ""))
        for row in connection.execute(kept)
    )


def load_unfinished(connection: Connection, shard: int = 0, between: Callable[[], object] = lambda: None) -> Unfinished:
    """Return all that a scheduler of a shard goes on with. `between` is called before each action: there may be very many."""

    def action_of(row: Row[Any]) -> UnfinishedAction:
        between()
        return _unfinished_action(row)

    actions = (
        select(table(Action), Message.message)
        .join_from(Action, Message, Message.action == Action.id, isouter=True)
        .where(Action.ended_at.is_(None), Action.shard == shard)
        .order_by(Action.position)
    )
    own = Environment.shard == shard
    environments = select(table(Environment)).where(Environment.ended_at.is_(None), own).order_by(Environment.created_at, Environment.id)
    # An environment's pod is what its opening was granted.
    opened = (Action.kind == "cpu.open") & (Action.environment == Environment.id) & (Action.status == "succeeded")
    pods = (
        select(Environment.id, Action.core_ids)
        .join_from(Environment, Action, opened & (Action.trajectory == Environment.trajectory) & (Action.job == Environment.job))
        .where(Environment.ended_at.is_(None), Environment.pod_cores > 0, own)
        .order_by(Action.position)
    )
    nodes = select(table(Node)).where(Node.state.in_(NODE_HELD), Node.shard == shard).order_by(Node.joined_at, Node.name)
    away = select(table(Node)).where(Node.state.not_in(NODE_HELD), Node.changed_at > clock.time() - AWAY_LOADED_S, Node.shard == shard)
    draining = select(Node.name).where(Node.draining).order_by(Node.name)  # of all shards: a node that joins another one drains on
    ended = select(Action.id).where(Action.ended_at > clock.time() - ENDS_LOADED_S, Action.shard == shard)
    ended = ended.order_by(Action.ended_at.desc()).limit(ENDS_LOADED)
    gone = [
        select(Environment.id, Environment.state, Environment.node, Environment.reason, Environment.ended_at, Environment.cause)
        .where(Environment.ended_at > clock.time() - ENDS_LOADED_S, Environment.state == state, own)
        .order_by(Environment.ended_at.desc())
        .limit(REMEMBERED)
        for state in ENVIRONMENT.ends
    ]
    lost = (Environment.id == Action.environment) & (Environment.state == "lost") & (Action.status == "lost")
    unpublished = (
        select(Action.id, Message.message, Action.status, Action.reason, Action.cause, Environment.node)
        .join_from(Message, Action, Message.action == Action.id)
        .join(Environment, lost, isouter=True)
        .where(Action.ended_at > clock.time() - ENDS_LOADED_S, Action.shard == shard)
        .order_by(Action.ended_at, Action.position)
    )
    since = clock.time() - SPENT_LOADED_S
    spent = (
        select(*DECLARED, Action.granted_at)
        .where(Action.ended_at > since, Action.granted_at > since, Action.quota.is_not(None), Action.shard == shard)
        .order_by(Action.granted_at)
    )
    return Unfinished(
        actions=[action_of(row) for row in connection.execute(actions)],
        environments=[
            filled(EnvironmentChanged, row, at=row.changed_at, client=row.client or "") for row in connection.execute(environments)
        ],
        nodes=[filled(NodeChanged, row, at=row.changed_at) for row in connection.execute(nodes)],
        away=[filled(NodeChanged, row, at=row.changed_at) for row in connection.execute(away.order_by(Node.changed_at, Node.name))],
        ended=tuple(connection.execute(ended).scalars().all()[::-1]),
        spent=tuple(SpentAction(header=header_of(row), granted_at=row.granted_at) for row in connection.execute(spent)),
        unpublished=tuple(filled(UnpublishedEnd, row, environment_lost_on=row.node or "") for row in connection.execute(unpublished)),
        gone=tuple(
            filled(EnvironmentGone, row, node=row.node or "", at=row.ended_at)
            for query in gone
            for row in connection.execute(query).all()[::-1]
        ),
        draining=tuple(connection.execute(draining).scalars()),
        set_aside=tuple(
            replace(one, message=message)
            for one in set_aside(connection)
            for message, of_shard in (read_failure_key(one.message),)
            if of_shard == shard
        ),
        pods={row.id: tuple(row.core_ids) for row in connection.execute(pods)},
    )


def _unfinished_action(row: Row[Any]) -> UnfinishedAction:
    if row.status != RUNNING:
        return filled(UnfinishedAction, row, header=header_of(row), unit_s=row.unit_s or 0.0, grant=None, granted_at=None)
    held = filled(GrantFacts, row, attempt=row.attempts, core_ids=tuple(row.core_ids), cell_ids=tuple(row.cell_ids))
    return filled(UnfinishedAction, row, header=header_of(row), unit_s=row.unit_s or 0.0, grant=Grant(**shared(GrantFacts, held)))
