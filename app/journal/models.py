"""The tables of the journal, and the words that may stand in their columns of state.

Only table definitions live here: no connection, no query. Times are seconds since the epoch, durations seconds.
`migrations/` builds the same tables; a test holds the two together.

What may stand in a column of state, and which of its words are ends, follows from the tables in `scheduler/model/lifecycle.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, TypeVar, cast

from sqlalchemy import JSON, BigInteger, CheckConstraint, Double, Index, Integer, MetaData, Row, Table, Text, TextClause, false, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from scheduler.model.lifecycle import ACTION, ENVIRONMENT, NODE, SERVICE, ActionState, NodeState, ServiceState
from tangram.ends import CAUSES, FAULTS, NO_CAUSE

WAITING: Final[ActionState] = "waiting"
RUNNING: Final[ActionState] = "running"
NODE_UP: Final[NodeState] = "up"
NODE_SILENT: Final[NodeState] = "silent"
ABSENT: Final[ServiceState] = "absent"

INFRA_FAILED: Final = text("fault = 'infrastructure'")
UNFINISHED: Final = text("ended_at IS NULL")
ENDED: Final = text("ended_at IS NOT NULL")

Json = JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")


def words_of(column: str, words: Iterable[str]) -> CheckConstraint:
    """Return the constraint that lets only these words stand in `column`."""
    return CheckConstraint(f"{column} IN ({', '.join(map(repr, words))})", name=column)


def ended_in(column: str, ends: Iterable[str]) -> CheckConstraint:
    """Return the constraint that `ended_at` is set in these states and in no others."""
    return CheckConstraint(f"(ended_at IS NOT NULL) = ({column} IN ({', '.join(map(repr, ends))}))", name="ended_at")


def partial_index(name: str, *columns: str, where: TextClause) -> Index:
    """Return an index of the rows of which `where` holds."""
    return Index(name, *columns, sqlite_where=where, postgresql_where=where)


class Base(DeclarativeBase):
    """Base of all tables: how Python types become columns, and how constraints are named."""

    metadata = MetaData(
        naming_convention={
            "pk": "pk_%(table_name)s",
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
        }
    )
    type_annotation_map = {str: Text(), float: Double(), dict[str, Any]: Json, list[int]: Json, list[str]: Json}  # noqa: RUF012


class Job(Base):
    """One RL training run, a tenant; known from its first action on."""

    __tablename__ = "jobs"

    name: Mapped[str] = mapped_column(primary_key=True)
    first_seen_at: Mapped[float]


class Action(Base):
    """One action, from reception to its end.

    `position` orders actions by reception. `action_class` is the class that the trainer gave, else the kind.
    `header` is what no other column says of its declaration; `header_of` returns the whole. `cause` says why it has ended so, and `fault`
    whose fault that is (`tangram/ends.py`). `unit_s` are the core- or cell-seconds that all its grants held. Before the end they are those
    until the latest grant or resize.

    Where the worker grants memory by action, `memory_mb` is the most that its environment held while it ran, `resident_mb` what that held
    after it. `excerpt` is what is kept of a command: its text, exit code and last lines.

    `node`, `granted_at`, `units`, `resource`, `core_ids`, `cell_ids`, `background` and `resized_at` are those of the latest grant. Once the
    action waits again, that grant is in `earlier_grants`, and `core_ids` is absent here.
    """

    __tablename__ = "actions"

    id: Mapped[str] = mapped_column(primary_key=True)
    position: Mapped[int] = mapped_column(BigInteger)
    job: Mapped[str]
    trajectory: Mapped[str]
    environment: Mapped[str | None]
    kind: Mapped[str]
    action_class: Mapped[str]
    service: Mapped[str | None]
    quota: Mapped[str | None]
    priority: Mapped[int] = mapped_column(Integer)
    status: Mapped[str]
    reason: Mapped[str]
    cause: Mapped[str] = mapped_column(server_default=text("''"))
    fault: Mapped[str] = mapped_column(server_default=text("''"))
    attempts: Mapped[int] = mapped_column(Integer)
    header: Mapped[dict[str, Any]]
    submitted_at: Mapped[float]
    received_at: Mapped[float]
    granted_at: Mapped[float | None]
    started_at: Mapped[float | None]
    ended_at: Mapped[float | None]
    node: Mapped[str | None]
    units: Mapped[int | None] = mapped_column(Integer)
    resource: Mapped[str] = mapped_column(server_default=text("''"))
    core_ids: Mapped[list[int] | None] = mapped_column(Json)
    cell_ids: Mapped[list[int] | None] = mapped_column(Json)
    background: Mapped[bool | None]
    resized_at: Mapped[float | None]
    unit_s: Mapped[float | None]
    queue_s: Mapped[float | None]
    background_s: Mapped[float | None] = mapped_column(server_default=text("0"))
    overhead_s: Mapped[float | None]
    execution_s: Mapped[float | None]
    act_s: Mapped[float | None]
    cpu_s: Mapped[float | None]
    memory_mb: Mapped[int | None] = mapped_column(Integer)
    resident_mb: Mapped[int | None] = mapped_column(Integer)
    excerpt: Mapped[dict[str, Any] | None]
    shard: Mapped[int] = mapped_column(Integer, server_default=text("0"))

    # The indexes over ended_at are partial: an action enters them once, at its end, and costs nothing before.
    __table_args__ = (
        words_of("status", ACTION.states),
        ended_in("status", ACTION.ends),
        words_of("cause", (NO_CAUSE, *CAUSES)),
        words_of("fault", FAULTS),
        partial_index("ix_actions_unfinished", "position", where=UNFINISHED),
        Index("ix_actions_trajectory", "trajectory"),
        partial_index("ix_actions_infra_failed", "cause", where=INFRA_FAILED),
        partial_index("ix_actions_job_ended_at", "job", "ended_at", where=ENDED),
        partial_index("ix_actions_ended_at", "ended_at", where=ENDED),
    )


class Message(Base):
    """The whole Celery message of an action, kept until the end is known to be stored as the result.

    It is most of what an action weighs. SQLite uses the room of a row that is removed, but not that of one that becomes shorter.
    """

    __tablename__ = "messages"

    action: Mapped[str] = mapped_column(primary_key=True)
    message: Mapped[str]


class GrantColumns:
    """What the `attempt`-th try of an action holds, or held last; `released_at` is absent while it holds it.

    `resource` says what `units` count: `cores`, `cells`, or nothing (empty) for actions without compute. In the `background` it has
    no core of its own, and `units` are those that it had last. `resized_at` is absent where nothing has changed since the start.
    """

    action: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(Integer, primary_key=True)
    node: Mapped[str]
    resource: Mapped[str]
    units: Mapped[int] = mapped_column(Integer)
    core_ids: Mapped[list[int]]
    cell_ids: Mapped[list[int]]
    background: Mapped[bool] = mapped_column(server_default=false())
    granted_at: Mapped[float]
    resized_at: Mapped[float | None]
    released_at: Mapped[float | None]


class EarlierGrant(GrantColumns, Base):
    """A grant that was given back before its action ended."""

    __tablename__ = "earlier_grants"


class Views(DeclarativeBase):
    """Base of what is read like a table. A migration that makes `actions` anew has to make its view anew, too."""

    type_annotation_map = Base.type_annotation_map


class Grant(GrantColumns, Views):
    """Each grant: a view of `actions`, whose rows have the latest one, and of `earlier_grants`."""

    __tablename__ = "grants"


class Environment(Base):
    """A stateful sandbox of a trajectory; `pod_cores` are cores it holds for itself, 0 where cores go to actions.

    It goes with its `client`, where it has one, and `owner` names that for people. A lease of its own ends at `ends_at`, which before
    it stands is so long after `used_at`. Without one its last use is at most a part of the lease later than `used_at`. `cause` is that of
    its end.
    """

    __tablename__ = "environments"

    id: Mapped[str] = mapped_column(primary_key=True)
    job: Mapped[str]
    trajectory: Mapped[str]
    state: Mapped[str]
    node: Mapped[str | None]
    memory_mb: Mapped[int] = mapped_column(Integer)
    pod_cores: Mapped[int] = mapped_column(Integer)
    reason: Mapped[str]
    created_at: Mapped[float]
    opened_at: Mapped[float | None]
    changed_at: Mapped[float]
    ended_at: Mapped[float | None]
    client: Mapped[str | None]
    cause: Mapped[str] = mapped_column(server_default=text("''"))
    owner: Mapped[str] = mapped_column(server_default=text("''"))
    ends_at: Mapped[float | None]
    used_at: Mapped[float | None]
    shard: Mapped[int] = mapped_column(Integer, server_default=text("0"))

    __table_args__ = (
        words_of("state", ENVIRONMENT.states),
        ended_in("state", ENVIRONMENT.ends),
        partial_index("ix_environments_unfinished", "created_at", where=UNFINISHED),
        Index("ix_environments_job", "job"),
        partial_index("ix_environments_ended_at", "ended_at", where=ENDED),
    )


class Node(Base):
    """A host with one worker; `description` is what that worker said when it joined. `draining` stays whatever the state is.

    Of a node that is up in another shard, its earlier shard changes nothing.
    """

    __tablename__ = "nodes"

    name: Mapped[str] = mapped_column(primary_key=True)
    state: Mapped[str]
    reason: Mapped[str]
    description: Mapped[dict[str, Any]]
    joined_at: Mapped[float | None]
    changed_at: Mapped[float]
    draining: Mapped[bool] = mapped_column(server_default=false())
    shard: Mapped[int] = mapped_column(Integer, server_default=text("0"))

    __table_args__ = (words_of("state", NODE.states),)


class Service(Base):
    """A model that can be resident on GPU cells, as the node that named it last described it."""

    __tablename__ = "services"

    name: Mapped[str] = mapped_column(primary_key=True)
    node: Mapped[str]
    description: Mapped[dict[str, Any]]
    changed_at: Mapped[float]


class ServiceInstance(Base):
    """An instance of a service on a node, named by its cells (`0,1`), as its worker last said.

    `memory_mb` and `host_mb` are the measured MiB that it holds on its cells and in host memory; `starts`, `restores`, `evictions`,
    `leaks` (evictions that did not free the memory) and `wrong_answers` (restores that brought back spoilt weights) count since its
    worker began. Of a node that is not up it says how things were.
    """

    __tablename__ = "service_instances"

    node: Mapped[str] = mapped_column(primary_key=True)
    service: Mapped[str] = mapped_column(primary_key=True)
    cells: Mapped[str] = mapped_column(primary_key=True)
    state: Mapped[str]
    reason: Mapped[str]
    memory_mb: Mapped[float]
    host_mb: Mapped[float]
    starts: Mapped[int] = mapped_column(Integer)
    restores: Mapped[int] = mapped_column(Integer)
    evictions: Mapped[int] = mapped_column(Integer)
    leaks: Mapped[int] = mapped_column(Integer)
    wrong_answers: Mapped[int] = mapped_column(Integer, server_default="0")
    changed_at: Mapped[float]

    __table_args__ = (words_of("state", SERVICE.states),)


class Run(Base):
    """One replay or benchmark: its actions are those of `jobs` submitted between `started_at` and `ended_at`."""

    __tablename__ = "runs"

    id: Mapped[str] = mapped_column(primary_key=True)
    policy: Mapped[str]
    trace: Mapped[str]
    jobs: Mapped[list[str]]
    options: Mapped[dict[str, Any]]
    summary: Mapped[dict[str, Any] | None] = mapped_column(Json)
    started_at: Mapped[float]
    ended_at: Mapped[float | None]

    __table_args__ = (Index("ix_runs_started_at", "started_at"),)


class ActionHour(Base):
    """Figures of the ended actions that were submitted in the hour that began at `hour`, and whose rows retention has removed.

    `actions` counts them; seconds are sums. `core_s` and `cell_s` are the core- and cell-seconds that their grants held. `histograms`
    has, for each part of the ACT, the number of actions by bin (`app/journal/rollup.py`), `causes` the number of actions by the cause of
    their end, where somebody is to blame for it.
    """

    __tablename__ = "action_hours"

    job: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    action_class: Mapped[str] = mapped_column(primary_key=True)
    hour: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    status: Mapped[str] = mapped_column(primary_key=True)
    actions: Mapped[int] = mapped_column(BigInteger)
    act_s: Mapped[float]
    queue_s: Mapped[float]
    background_s: Mapped[float] = mapped_column(server_default=text("0"))
    overhead_s: Mapped[float]
    execution_s: Mapped[float]
    cpu_s: Mapped[float]
    core_s: Mapped[float]
    cell_s: Mapped[float]
    histograms: Mapped[dict[str, Any]]
    causes: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))

    __table_args__ = (words_of("status", ACTION.ends),)


class EnvironmentHour(Base):
    """How many environments of a job were created in the hour that began at `hour` and ended in `state`; retention has removed their rows.

    `pod_core_s` are the core-seconds that they held for themselves.
    """

    __tablename__ = "environment_hours"

    job: Mapped[str] = mapped_column(primary_key=True)
    hour: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    state: Mapped[str] = mapped_column(primary_key=True)
    environments: Mapped[int] = mapped_column(BigInteger)
    pod_core_s: Mapped[float]

    __table_args__ = (words_of("state", ENVIRONMENT.ends),)


class FailedMessage(Base):
    """A message on which schedulers failed and stopped; from the second failure on it is set aside (`scheduler/live/poison.py`).

    `message` is its key, with its shard where that is not the first one, `action` the action that it is about. `failures` counts
    schedulers; `epoch`, `traceback` and `failed_at` are those of the last one.
    """

    __tablename__ = "failed_messages"

    message: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str]
    action: Mapped[str | None]
    failures: Mapped[int] = mapped_column(Integer)
    epoch: Mapped[int] = mapped_column(BigInteger)
    traceback: Mapped[str]
    failed_at: Mapped[float]


class LeaseRow(Base):
    """Who holds the lease `name`, empty for nobody; `epoch`, the fencing token, grows at every change of holder."""

    __tablename__ = "leases"

    name: Mapped[str] = mapped_column(primary_key=True)
    holder: Mapped[str]
    epoch: Mapped[int] = mapped_column(BigInteger)
    expires_at: Mapped[float]


class GatewayToken(Base):
    """A token with which callers of the gateway speak for a `job`, as the SHA-256 of its text; it counts until it is revoked."""

    __tablename__ = "gateway_tokens"

    hash: Mapped[str] = mapped_column(primary_key=True)
    job: Mapped[str]
    created_at: Mapped[float]
    revoked_at: Mapped[float | None]

    __table_args__ = (Index("ix_gateway_tokens_job", "job"),)


AnyRow = Row[*tuple[Any, ...]]
M = TypeVar("M", bound=DeclarativeBase)
IN_COLUMNS: Final = ("kind", "job", "trajectory", "environment", "service")
"""What a header declares and a column of `actions` says, too."""


DECLARED: Final = (Action.header, *(getattr(Action, name) for name in IN_COLUMNS))
"""The columns of a header."""


def header_of(row: AnyRow | Action) -> dict[str, Any]:
    """Return the header of an action, from a row with the columns `DECLARED`."""
    declared: dict[str, Any] = row.header
    return {name: value for name in IN_COLUMNS if (value := getattr(row, name)) is not None} | declared


def rows_of(model: type[M], rows: Iterable[AnyRow]) -> list[M]:
    """Return rows that have the columns of a table, or those of them that were asked for, typed as its model."""
    return cast(list[M], list(rows))


def table(model: type[DeclarativeBase]) -> Table:
    """Return the table of `model`, for statements of SQLAlchemy Core: the ORM's cost a multiple to execute."""
    return cast(Table, model.__table__)
