"""What the gateway reads from the journal's database: nodes' labels, environments that stand, how actions are.

Queries run on threads, so that the event loop goes on. Every method raises `InfraFailed` when the database cannot be read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from sqlalchemy import Connection, Engine, select

from app.gateway.errors import InfraFailed
from app.journal.database import DatabaseError, snapshot
from app.journal.leader import SCHEDULER_LEASE
from app.journal.models import NODE_UP, Action, Environment, LeaseRow, Node, table

LABELS_S = 5.0
"""Seconds for which the labels of nodes are remembered."""

_ACTIONS, _ENVIRONMENTS, _LEASES, _NODES = table(Action), table(Environment), table(LeaseRow), table(Node)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionState:
    """How an action is; `status` is a word of its life cycle."""

    id: str
    job: str
    kind: str
    status: str
    reason: str


class Journal:
    """Reads the journal for one event loop."""

    def __init__(self, engine: Engine) -> None:
        """Read from the database of `engine`."""
        self._engine = engine
        self._labels: tuple[float, frozenset[str]] = (float("-inf"), frozenset())

    async def labels(self) -> frozenset[str]:
        """Return the labels of all CPU nodes that are up; none where there is no such node."""
        read_at, labels = self._labels
        if time.monotonic() - read_at > LABELS_S:
            labels = await self._ask(_read_labels)
            self._labels = time.monotonic(), labels
        return labels

    async def services(self) -> dict[str, str]:
        """Return what the services of all GPU nodes that are up are for, `score` or `logprobs`, by name."""
        return await self._ask(_read_services)

    async def environments(self, job: str) -> list[str]:
        """Return the ids of the environments of a job that have not ended, in the order of their creation."""
        rows = (
            select(_ENVIRONMENTS.c.id)
            .where(_ENVIRONMENTS.c.ended_at.is_(None), _ENVIRONMENTS.c.job == job)
            .order_by(_ENVIRONMENTS.c.created_at, _ENVIRONMENTS.c.id)
        )
        return await self._ask(lambda connection: list(connection.execute(rows).scalars()))

    async def stands(self, environment: str) -> bool:
        """Say whether an environment is written down and has not ended."""
        row = select(_ENVIRONMENTS.c.id).where(_ENVIRONMENTS.c.id == environment, _ENVIRONMENTS.c.ended_at.is_(None))
        return await self._ask(lambda connection: connection.execute(row).scalar_one_or_none()) is not None

    async def action(self, action_id: str) -> ActionState | None:
        """Return how an action is; None where the journal does not know it."""
        columns = (_ACTIONS.c.id, _ACTIONS.c.job, _ACTIONS.c.kind, _ACTIONS.c.status, _ACTIONS.c.reason)
        row = await self._ask(lambda connection: connection.execute(select(*columns).where(_ACTIONS.c.id == action_id)).one_or_none())
        return None if row is None else ActionState(**row._mapping)

    async def unfinished(self, environment: str, session: str) -> list[str]:
        """Return the ids of the actions that run or wait in a session of an environment."""
        rows = select(_ACTIONS.c.id, _ACTIONS.c.header).where(_ACTIONS.c.ended_at.is_(None), _ACTIONS.c.environment == environment)
        found = await self._ask(lambda connection: connection.execute(rows).all())
        return [row.id for row in found if row.header.get("session") == session]

    async def has_leader(self) -> bool:
        """Say whether a scheduler leads."""
        lease = select(_LEASES.c.expires_at).where(_LEASES.c.name == SCHEDULER_LEASE)
        expires_at = await self._ask(lambda connection: connection.execute(lease).scalar_one_or_none())
        return expires_at is not None and expires_at > time.time()

    async def _ask(self, question: Callable[[Connection], T]) -> T:
        try:
            return await asyncio.to_thread(self._answer, question)
        except DatabaseError as error:
            raise InfraFailed(f"the journal cannot be read: {error}", "database") from error

    def _answer(self, question: Callable[[Connection], T]) -> T:
        with snapshot(self._engine) as connection:
            return question(connection)


def _read_services(connection: Connection) -> dict[str, str]:
    descriptions = connection.execute(select(_NODES.c.description).where(_NODES.c.state == NODE_UP)).scalars()
    return {name: str(service.get("task", "")) for one in descriptions for name, service in one.get("services", {}).items()}


def _read_labels(connection: Connection) -> frozenset[str]:
    descriptions = connection.execute(select(_NODES.c.description).where(_NODES.c.state == NODE_UP)).scalars()
    return frozenset(label for one in descriptions if one.get("cores") for label in one.get("labels", ()))
