"""What is left on one node: the actions that run there, and the environments that stand there or are being opened."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Engine, select

from app.journal.database import snapshot
from app.journal.models import RUNNING, Action, Environment, Node


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionLeft:
    """A running action; `environment` is empty where it runs in none."""

    id: str
    job: str
    kind: str
    environment: str
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentLeft:
    """An environment that has not ended."""

    id: str
    job: str
    trajectory: str
    owner: str
    state: str
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLeft:
    """A node with what is left on it, the oldest first. Ages are seconds since the grant or the request to open."""

    node: str
    state: str
    draining: bool
    running: tuple[ActionLeft, ...]
    environments: tuple[EnvironmentLeft, ...]

    @property
    def empty(self) -> bool:
        """Whether nothing is left."""
        return not self.running and not self.environments


def node_left(engine: Engine, name: str, now: float) -> NodeLeft | None:
    """Return what is left on a node at `now`; None where the journal does not know it. Raises `DatabaseError`.

    Where the node is draining by this, no grant is missing that was given before it began to.
    """
    running = select(Action.id, Action.job, Action.kind, Action.environment, Action.granted_at)
    running = running.where(Action.ended_at.is_(None), Action.status == RUNNING, Action.node == name).order_by(Action.granted_at, Action.id)
    columns = (Environment.id, Environment.job, Environment.trajectory, Environment.owner, Environment.state, Environment.created_at)
    stand = select(*columns).where(Environment.ended_at.is_(None), Environment.node == name)
    with snapshot(engine) as connection:
        node = connection.execute(select(Node.state, Node.draining).where(Node.name == name)).one_or_none()
        if node is None:
            return None
        return NodeLeft(
            node=name,
            state=node.state,
            draining=node.draining,
            running=tuple(
                ActionLeft(id=id, job=job, kind=kind, environment=environment or "", age_s=max(0.0, now - (granted_at or now)))
                for id, job, kind, environment, granted_at in connection.execute(running)
            ),
            environments=tuple(
                EnvironmentLeft(id=id, job=job, trajectory=trajectory, owner=owner, state=state, age_s=max(0.0, now - created_at))
                for id, job, trajectory, owner, state, created_at in connection.execute(
                    stand.order_by(Environment.created_at, Environment.id)
                )
            ),
        )


def known_nodes(engine: Engine) -> list[str]:
    """Return the names of all nodes that the journal knows, in order. Raises `DatabaseError`."""
    with snapshot(engine) as connection:
        return list(connection.execute(select(Node.name).order_by(Node.name)).scalars())
