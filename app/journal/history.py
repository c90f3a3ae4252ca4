"""What was: the actions of a selection with the grants that they held, in the order of time.

For reports and exports, which look at single actions; `app/journal/figures.py` sums them up. Only rows that are still in the journal are
here, not what retention has rolled up. Times are seconds since the epoch, durations seconds. What cannot be read raises `DatabaseError`,
here or in the `snapshot` that a function is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import Connection, Engine, Select, select

from app.journal.database import snapshot
from app.journal.figures import Selection, conditions_of
from app.journal.models import Action, Environment, Grant, Node, Service, header_of, rows_of, table


class PastPod(NamedTuple):
    """An environment that held cores for itself, from when it was open; `ended_at` is absent while it stands."""

    node: str | None
    core_ids: list[int]
    opened_at: float
    ended_at: float | None


class NodeSize(NamedTuple):
    """What a node offers, as it said last."""

    cores: int
    cells: int


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Actions by submission, grants by when they were given, the nodes that these name, and the limits, MB, of environments measured."""

    actions: Sequence[Action]
    grants: Sequence[Grant]
    pods: list[PastPod]
    nodes: Mapping[str, NodeSize]
    limits: Mapping[str, int]


class Declared(NamedTuple):
    """An action that was carried out, with the header that declares it."""

    past: Action
    header: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Declarations:
    """Actions by submission, with their headers, and the services that they name, as their nodes described them."""

    actions: list[Declared]
    services: Mapping[str, Mapping[str, Any]]


_ACTION = tuple(column for column in table(Action).columns if column.name not in ("header", "core_ids", "cell_ids", "excerpt"))
"""What a report or an export asks of an action. What it holds is in its grants."""


def history(connection: Connection, selection: Selection) -> History:
    """Return what the selected actions did, and what they held, from a snapshot of the database."""
    where = conditions_of(selection)
    in_time = (Action.submitted_at, Action.position)
    actions = rows_of(Action, connection.execute(select(*_ACTION).where(*where).order_by(*in_time)))
    held = select(table(Grant)).join_from(Grant, Action, Grant.action == Action.id).where(*where)
    grants = rows_of(Grant, connection.execute(held.order_by(Grant.granted_at, Action.position)))
    pods = [PastPod(*row) for row in connection.execute(_pods(selection))]
    named = {grant.node for grant in grants} | {pod.node for pod in pods if pod.node is not None}
    measured = select(Action.environment).where(*where, Action.memory_mb.is_not(None))
    declared = select(Environment.id, Environment.memory_mb).where(Environment.id.in_(measured))
    limits = {row.id: row.memory_mb for row in connection.execute(declared)}
    return History(actions=actions, grants=grants, pods=pods, nodes=_nodes(connection, named), limits=limits)


def declarations(engine: Engine, selection: Selection) -> Declarations:
    """Return what the selected actions declared, and how they ended."""
    query = select(*_ACTION, Action.header).where(*conditions_of(selection)).order_by(Action.submitted_at, Action.position)
    with snapshot(engine) as connection:
        actions = [Declared(row, header_of(row)) for row in rows_of(Action, connection.execute(query))]
        services = {row.name: row.description for row in connection.execute(select(table(Service)).order_by(Service.name))}
    named = {action.past.service for action in actions}
    return Declarations(actions=actions, services={name: found for name, found in services.items() if name in named})


def _pods(selection: Selection) -> Select[*tuple[Any, ...]]:
    # An environment's pod is what its opening was granted.
    opening = (Action.environment == Environment.id) & (Action.trajectory == Environment.trajectory) & (Action.job == Environment.job)
    query = (
        select(Environment.node, Action.core_ids, Environment.opened_at, Environment.ended_at)
        .join_from(Environment, Action, opening)
        .where(Environment.pod_cores > 0, Environment.opened_at.is_not(None), Action.kind == "cpu.open", Action.status == "succeeded")
        .order_by(Environment.opened_at)
    )
    return query.where(*conditions_of(selection))


def _nodes(connection: Connection, named: set[str]) -> dict[str, NodeSize]:
    rows = connection.execute(select(Node.name, Node.description).order_by(Node.name))
    return {
        row.name: NodeSize(int(row.description.get("cores", 0)), int(row.description.get("cells", 0))) for row in rows if row.name in named
    }
