"""What the gateway reads from the journal's database: nodes' labels, environments that stand, how actions are.

Queries run on threads, so that the event loop goes on. Every method raises `InfraFailed` when the database cannot be read, and
`NotFound` for a name that it cannot hold.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, func, select

from app.gateway.errors import InfraFailed, NotFound
from app.journal.database import DatabaseError, Unaskable, snapshot
from app.journal.leader import SCHEDULER_LEASE
from app.journal.models import Action, Environment, LeaseRow, Node, rows_of, table
from scheduler.model.lifecycle import NODE_HELD
from tangram.ends import fault_of, loss_cause

_log = logging.getLogger(__name__)

LABELS_S = 5.0
"""Seconds for which the labels of nodes are remembered."""

_ACTIONS, _ENVIRONMENTS, _LEASES, _NODES = table(Action), table(Environment), table(LeaseRow), table(Node)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentEnd:
    """How an environment has ended; `cause` is that of actions on it (docs/ends.md)."""

    reason: str
    cause: str

    @property
    def is_loss(self) -> bool:
        """Whether it was lost: neither its owner nor its lease has ended it."""
        return fault_of(self.cause) != "caller"


class Journal:
    """Reads the journal for one event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._labels: tuple[float, frozenset[str]] = (float("-inf"), frozenset())

    async def labels(self) -> frozenset[str]:
        """Return the labels of all CPU nodes that are up; none where there is no such node."""
        read_at, labels = self._labels
        if time.monotonic() - read_at > LABELS_S:
            described = await self._ask(_descriptions)
            labels = frozenset(label for one in described if one.get("cores") for label in one.get("labels", ()))
            self._labels = time.monotonic(), labels
        return labels

    async def services(self) -> dict[str, str]:
        """Return what the services of all GPU nodes that are up are for, `score` or `logprobs`, by name."""
        described = await self._ask(_descriptions)
        return {name: str(service.get("task", "")) for one in described for name, service in one.get("services", {}).items()}

    async def environments(self, job: str) -> list[str]:
        """Return the ids of the environments of a job that have not ended, in the order of their creation."""
        rows = (
            select(_ENVIRONMENTS.c.id)
            .where(_ENVIRONMENTS.c.ended_at.is_(None), _ENVIRONMENTS.c.job == job)
            .order_by(_ENVIRONMENTS.c.created_at, _ENVIRONMENTS.c.id)
        )
        return await self._ask(lambda connection: list(connection.execute(rows).scalars()))

    async def standing(self, job: str, environment: str) -> Environment | None:
        """Return trajectory and times of an environment of a job, whoever has opened it; None where it does not stand."""
        columns = (_ENVIRONMENTS.c.trajectory, _ENVIRONMENTS.c.created_at, _ENVIRONMENTS.c.ends_at)
        here = (_ENVIRONMENTS.c.id == environment, _ENVIRONMENTS.c.job == job, _ENVIRONMENTS.c.state == "open")
        return await self._ask(lambda connection: next(iter(rows_of(Environment, connection.execute(select(*columns).where(*here)))), None))

    async def end_of(self, environment: str) -> EnvironmentEnd | None:
        """Return how an environment has ended; None for one that is written down and has not."""
        columns = (_ENVIRONMENTS.c.state, _ENVIRONMENTS.c.ended_at, _ENVIRONMENTS.c.reason, _ENVIRONMENTS.c.cause)
        question = select(*columns).where(_ENVIRONMENTS.c.id == environment)
        row = await self._ask(lambda connection: connection.execute(question).one_or_none())
        if row is None:
            return EnvironmentEnd(reason="it ended long ago", cause="environment_closed")
        if row.ended_at is None:
            return None
        return EnvironmentEnd(reason=row.reason, cause=loss_cause(row.cause) if row.state == "lost" else row.cause or "environment_closed")

    async def action(self, action_id: str) -> Action | None:
        """Return how an action is; None where the journal does not know it."""
        columns = (_ACTIONS.c.id, _ACTIONS.c.job, _ACTIONS.c.kind, _ACTIONS.c.status, _ACTIONS.c.reason, _ACTIONS.c.cause)
        query = select(*columns).where(_ACTIONS.c.id == action_id)
        return await self._ask(lambda connection: next(iter(rows_of(Action, connection.execute(query))), None))

    async def unfinished(self, environment: str, session: str) -> list[str]:
        """Return the ids of the actions that run or wait in a session of an environment."""
        rows = select(_ACTIONS.c.id, _ACTIONS.c.header).where(_ACTIONS.c.ended_at.is_(None), _ACTIONS.c.environment == environment)
        found = await self._ask(lambda connection: connection.execute(rows).all())
        return [row.id for row in found if row.header.get("session") == session]

    async def has_leader(self) -> bool:
        """Say whether a scheduler leads, of any shard."""
        lease = select(func.max(_LEASES.c.expires_at)).where(_LEASES.c.name.startswith(SCHEDULER_LEASE))
        expires_at = await self._ask(lambda connection: connection.execute(lease).scalar_one_or_none())
        return expires_at is not None and expires_at > time.time()

    async def _ask(self, question: Callable[[Connection], T]) -> T:
        try:
            return await asyncio.to_thread(self._answer, question)
        except Unaskable as error:
            raise NotFound(str(error)) from error
        except DatabaseError as error:
            _log.warning("the journal cannot be read: %s", error)  # with the address, which is nothing for callers
            raise InfraFailed("the journal cannot be read", "stack_unreachable") from error

    def _answer(self, question: Callable[[Connection], T]) -> T:
        with snapshot(self._engine) as connection:
            return question(connection)


def _descriptions(connection: Connection) -> Sequence[dict[str, Any]]:
    """Return what the nodes that are up say of themselves."""
    return connection.execute(select(_NODES.c.description).where(_NODES.c.state.in_(NODE_HELD))).scalars().all()
