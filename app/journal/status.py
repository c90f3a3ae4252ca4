"""What the journal says of the present: nodes, services, environments, the actions by status, and what is left on one node.

Nothing is written here. `status` raises `DatabaseError` when the database cannot be read. Totals count what retention has rolled up
(`app/journal/rollup.py`), too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Engine, Row, Text, cast, func, select

from app.journal.database import snapshot
from app.journal.models import (
    ABSENT,
    INFRA_FAILED,
    NODE_UP,
    RUNNING,
    WAITING,
    Action,
    ActionHour,
    Environment,
    EnvironmentHour,
    Node,
    ServiceInstance,
    table,
)
from app.journal.unfinished import set_aside
from scheduler.live.entries import SetAside
from scheduler.model import InstanceFacts
from scheduler.model.copied import filled
from scheduler.model.lifecycle import NODE_HELD
from tangram.action import CELLS
from tangram.ends import fault_of


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """A node and what it holds now, as the journal knows it. It may be `draining` in any state."""

    name: str
    state: str
    draining: bool
    reason: str
    description: Mapping[str, Any]
    changed_at: float
    running: int
    environments: int
    shard: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceStatus(InstanceFacts):
    """An instance of a service, as its worker last said.

    `state` is that of the node where it is not up, `running` the actions on it now.
    """

    node: str
    cells: tuple[int, ...]
    state: str
    running: int
    changed_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStatus:
    """A service, where it is declared, and its instances that have been heard of.

    `declared` is what the nodes say of it, by node; those that are up alone.
    """

    name: str
    declared: Mapping[str, Mapping[str, Any]]
    instances: tuple[InstanceStatus, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The state of a deployment.

    `oldest_wait_s` is the age since submission of the action that waits longest, 0 for none. `set_aside` are the messages on which
    schedulers failed, and which none is given again; the latest first. `infra_failed` counts the actions that ended by a fault of the
    infrastructure, by cause.
    """

    nodes: tuple[NodeStatus, ...]
    services: tuple[ServiceStatus, ...]
    environments: Mapping[str, int]
    actions: Mapping[str, int]
    waiting_by_job: Mapping[str, int]
    oldest_wait_s: float
    set_aside: tuple[SetAside, ...]
    infra_failed: Mapping[str, int]


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


def status(engine: Engine, now: float) -> Status:
    """Return the state of the deployment at `now`; actions that have ended are counted, too."""
    with snapshot(engine) as connection:
        unended = Action.ended_at.is_(None)
        ended = _counts(connection.execute(select(ActionHour.status, func.sum(ActionHour.actions)).group_by(ActionHour.status)))
        actions = _sum(_counts(connection.execute(select(Action.status, func.count()).group_by(Action.status))), ended)
        infra_failed = _infra_failed(connection)
        by_job = select(Action.job, func.count()).where(unended, Action.status == WAITING).group_by(Action.job).order_by(Action.job)
        waiting_by_job = _counts(connection.execute(by_job))
        oldest = connection.execute(select(func.min(Action.submitted_at)).where(unended, Action.status == WAITING)).scalar_one()
        gone = select(EnvironmentHour.state, func.sum(EnvironmentHour.environments)).group_by(EnvironmentHour.state)
        environments = _counts(connection.execute(select(Environment.state, func.count()).group_by(Environment.state)))
        environments = _sum(environments, _counts(connection.execute(gone)))
        running = select(Action.node, func.count()).where(unended, Action.status == RUNNING).group_by(Action.node)
        opened = select(Environment.node, func.count()).where(Environment.ended_at.is_(None)).group_by(Environment.node)
        nodes = connection.execute(select(table(Node)).order_by(Node.state != NODE_UP, Node.name)).all()
        running_on, environments_on = _counts(connection.execute(running)), _counts(connection.execute(opened))
        instances = connection.execute(select(table(ServiceInstance)).order_by(ServiceInstance.node, ServiceInstance.cells)).all()
        on_cells = select(Action.service, Action.node, Action.cell_ids).where(unended, Action.status == RUNNING, Action.resource == CELLS)
        poison = set_aside(connection)
        on_instances = Counter((row.service, row.node, tuple(row.cell_ids)) for row in connection.execute(on_cells))
    return Status(
        nodes=tuple(
            filled(NodeStatus, node, running=running_on.get(node.name, 0), environments=environments_on.get(node.name, 0)) for node in nodes
        ),
        services=_services(nodes, instances, on_instances),
        environments=environments,
        actions=actions,
        waiting_by_job=waiting_by_job,
        oldest_wait_s=max(0.0, now - oldest) if oldest is not None else 0.0,
        set_aside=poison,
        infra_failed=infra_failed,
    )


def _infra_failed(connection: Connection) -> dict[str, int]:
    """Return how many actions ended by a fault of the infrastructure, by cause; those that were rolled up, too."""
    ours = select(Action.cause, func.count()).where(INFRA_FAILED).group_by(Action.cause)
    found = Counter(_counts(connection.execute(ours)))
    hours = select(ActionHour.causes).where(cast(ActionHour.causes, Text) != "{}")
    for causes in connection.execute(hours).scalars():
        found.update({cause: count for cause, count in causes.items() if fault_of(cause) == "infrastructure"})
    return dict(sorted(found.items()))


def _services(
    nodes: Sequence[Row[Any]], instances: Sequence[Row[Any]], running: Mapping[tuple[str, str, tuple[int, ...]], int]
) -> tuple[ServiceStatus, ...]:
    """Put together what the nodes declare and what they said of instances; those of a node that is not up are as that node is."""
    by_name = {node.name: node for node in nodes}
    declared: dict[str, dict[str, Any]] = {}
    for node in nodes:
        if node.state in NODE_HELD:
            for name, description in node.description.get("services", {}).items():
                declared.setdefault(name, {})[node.name] = description
    found: dict[str, list[InstanceStatus]] = {name: [] for name in declared}
    for row in instances:
        cells = tuple(int(cell) for cell in row.cells.split(",") if cell)
        home = by_name.get(row.node)
        gone = home is not None and home.state not in NODE_HELD and row.state != ABSENT
        status = filled(
            InstanceStatus,
            row,
            cells=cells,
            state=home.state if gone and home is not None else row.state,
            reason=f"node {row.node} is {home.state}; it was {row.state}" if gone and home is not None else row.reason,
            memory_mb=0.0 if gone else row.memory_mb,
            host_mb=0.0 if gone else row.host_mb,
            running=running.get((row.service, row.node, cells), 0),
        )
        found.setdefault(row.service, []).append(status)
    return tuple(ServiceStatus(name=name, declared=declared.get(name, {}), instances=tuple(found[name])) for name in sorted(found))


def _counts(rows: Iterable[Row[Any, int]]) -> dict[Any, int]:
    return {key: int(count) for key, count in rows}


def _sum(counts: dict[Any, int], more: Mapping[Any, int]) -> dict[Any, int]:
    return {**counts, **{key: counts.get(key, 0) + count for key, count in more.items()}}


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
                filled(ActionLeft, row, environment=row.environment or "", age_s=max(0.0, now - (row.granted_at or now)))
                for row in connection.execute(running)
            ),
            environments=tuple(
                filled(EnvironmentLeft, row, age_s=max(0.0, now - row.created_at))
                for row in connection.execute(stand.order_by(Environment.created_at, Environment.id))
            ),
        )


def known_nodes(engine: Engine) -> list[str]:
    """Return the names of all nodes that the journal knows, in order. Raises `DatabaseError`."""
    with snapshot(engine) as connection:
        return list(connection.execute(select(Node.name).order_by(Node.name)).scalars())
