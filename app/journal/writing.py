"""The journal in SQL: what the live scheduler knows, kept so that the next one can go on with it.

`SqlJournal.write` commits a batch of entries in one transaction; it is on the way of every action, so it folds
the batch first (`app/journal/folding.py`) and keeps its statements and its connection. Only writing entries
lives here. What had not ended is loaded by `app/journal/unfinished.py`; figures are in `app/journal/figures.py`.

A write may be repeated: on PostgreSQL it is, when the connection breaks and nobody knows whether the commit
arrived. Statements therefore set values, never add to them. With a lease, each transaction makes sure before its commit that
no other scheduler has taken over (`app/journal/leader.py`). A scheduler that slept through its lease can so write nothing more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from types import TracebackType
from typing import Any, Self, TypeVar

from sqlalchemy import Connection, Double, Engine, Executable, Text, and_, bindparam, delete, func, or_, select, update
from sqlalchemy.dialects.postgresql import insert as postgresql_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.exc import DBAPIError
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_delay, wait_exponential_jitter

from app.journal import folding
from app.journal.database import DatabaseError, database_errors, problem, shown, writing
from app.journal.leader import Lease
from app.journal.models import (
    ABSENT,
    NODE_UP,
    Action,
    Base,
    EarlierGrant,
    Environment,
    FailedMessage,
    Job,
    Message,
    Node,
    Service,
    ServiceInstance,
    table,
)
from app.journal.unfinished import load_unfinished
from scheduler.live.entries import (
    Entry,
    Unfinished,
)
from scheduler.model.lifecycle import NODE_HELD

log = logging.getLogger(__name__)

# Deadlock, serialization failure, and the shutdowns after which PostgreSQL comes back.
PASSING_SQLSTATES = ("40P01", "40001", "57P01", "57P02", "57P03")
GONE_KEPT_S = 86_400.0
"""Seconds for which the instances of a node that is not up are kept; then they go as soon as a worker joins."""

T = TypeVar("T")


class JournalError(DatabaseError):
    """Raised when the journal could not be written or read: disk full, connection lost for good, no tables."""


class LeaseLost(JournalError):
    """Raised when another scheduler has taken over: this one must stop."""


class SqlJournal:
    """Implements `scheduler.live.entries.Journal` on SQLite and PostgreSQL. For one thread at a time.

    With `lease`, nothing is written unless that lease is still held. What is written and loaded is that of the `shard`. `retry_s` is how
    long a write goes on trying to reach PostgreSQL after the connection broke.
    """

    def __init__(self, engine: Engine, *, lease: Lease | None = None, retry_s: float = 20.0, shard: int = 0) -> None:
        """Bind to `engine`; the first use connects."""
        self._engine = writing(engine)
        self._lease = lease
        self._shard = shard
        self._connection: Connection | None = None
        self._statements = _statements_of(engine.dialect.name)
        self._last_position = 0
        self._jobs: set[str] = set()
        self._retrying = Retrying(
            retry=retry_if_exception(_passes),
            stop=stop_after_delay(retry_s),
            wait=wait_exponential_jitter(multiplier=0.05, max=2.0),
            before_sleep=self._say_retry,
            reraise=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Give the connection back; a later use opens another."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def write(self, entries: Sequence[Entry]) -> None:
        """Commit `entries`, in order, in one transaction.

        Raises `JournalError` when they could not be committed; then none of them is, unless PostgreSQL was lost at the commit itself.
        Raises `LeaseLost` when another scheduler holds the lease.
        """
        if not entries:
            return
        fold = folding.Fold(self._last_position, self._shard)
        fold.add(entries)
        self._run(lambda connection: self._write(connection, fold))
        self._last_position = fold.last_position
        self._jobs.update(fold.jobs)

    def unfinished(self) -> Unfinished:
        """Load what had not ended: actions in order of reception, environments, nodes that were up.

        Raises `JournalError` when the database cannot be read.
        """
        return self._run(self._load)

    def _load(self, connection: Connection) -> Unfinished:
        if self._lease is None or connection.dialect.name != "postgresql":  # on SQLite this transaction keeps others from the lease
            return load_unfinished(connection, self._shard)
        self._lease.let_stand(connection)
        return load_unfinished(connection, self._shard, between=self._lease.keep)

    def has_ended(self, action_id: str) -> bool:
        """Return whether an action is known and has ended. Raises `JournalError` when the database cannot be read."""
        known = select(Action.id).where(Action.id == action_id, Action.ended_at.is_not(None))
        return self._run(lambda connection: connection.execute(known).first() is not None)

    def _run(self, work: Callable[[Connection], T]) -> T:
        with database_errors(self._engine.url, JournalError):
            result: T = self._retrying(self._transaction, work)
            return result

    def _transaction(self, work: Callable[[Connection], T]) -> T:
        try:
            if self._connection is None:
                self._connection = self._engine.connect()
                if self._lease is not None:
                    self._lease.bind(self._connection)
            with self._connection.begin():
                return work(self._connection)
        except BaseException:
            self.close()
            raise

    def _write(self, connection: Connection, fold: folding.Fold) -> None:
        execute, statements = connection.execute, self._statements
        if unseen := [row for name, row in fold.jobs.items() if name not in self._jobs]:
            execute(statements.job, unseen)
        # What becomes of a message depends on whether its action had ended before this batch.
        if messages := fold.messages():
            execute(statements.message, messages)
        if answered := fold.answered():
            execute(statements.answered, answered)
        # What is given back is what was held before this batch, as it was resized last.
        if resizes := fold.resizes():
            execute(statements.resize, resizes)
        if given_back := fold.given_back():
            execute(statements.given_back, given_back)
        if received := fold.received():
            execute(statements.received, received)
        for shape, rows in fold.received_and_changed().items():
            execute(statements.received_and_changed(shape), rows)
        for shape, rows in fold.changed().items():
            execute(statements.changed(shape), rows)
        if fold.published:
            execute(statements.published, list(fold.published.values()))
        for statement, group in (
            (statements.earlier, fold.earlier_grants()),
            (statements.environment, fold.environments.values()),
            (statements.node, fold.nodes.values()),
            (statements.draining, fold.draining.values()),
            (statements.service, fold.services.values()),
            (statements.forget, fold.forgotten.values()),
            (statements.instance, fold.instances.values()),
            (statements.failure, fold.failures.values()),
        ):
            if group:
                execute(statement, list(group))
        if fold.forgotten:
            execute(statements.prune, {"before": max(row["changed_at"] for row in fold.forgotten.values()) - GONE_KEPT_S})
        # Last: what comes between this and the commit is short, and ends by itself where it is not.
        if self._lease is not None and not (self._lease.is_sure or self._lease.held_in(connection)):
            raise LeaseLost(f"{shown(self._engine.url)}: another scheduler has taken over, this one writes no more")

    def _say_retry(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        log.warning("journal: %s; trying again", problem(error) if error else "failed")


@cache
def _statements_of(dialect: str) -> _Statements:
    return _Statements(dialect)


class _Statements:
    """The statements of one dialect, made once; those that depend on a shape when the shape first occurs."""

    def __init__(self, dialect: str) -> None:
        self._dialect_insert = postgresql_insert if dialect == "postgresql" else sqlite_insert
        self._received_and_changed: dict[folding.Shape, Executable] = {}
        self._changed: dict[folding.Shape, Executable] = {}
        self.job = self._insert(Job).on_conflict_do_nothing()
        self.received = self._insert(Action).on_conflict_do_nothing()
        known = select(Action.id).where(Action.ended_at.is_not(None))
        message = select(bindparam("action", type_=Text()), bindparam("message", type_=Text()))
        message = message.where(~known.where(Action.id == bindparam("action")).exists())
        self.message = self._insert(Message).from_select(["action", "message"], message).on_conflict_do_nothing()
        of, ended = Message.action == bindparam("of"), known.where(Action.id == bindparam("of")).exists()
        self.answered = delete(table(Message)).where(of, ~ended)
        self.published = delete(table(Message)).where(of, ended)
        held = (Action.id == bindparam("of"), Action.core_ids.is_not(None), Action.ended_at.is_(None))
        self.resize = update(table(Action)).where(*held, Action.attempts == bindparam("tried"))
        self.earlier = self._insert(EarlierGrant).on_conflict_do_nothing()
        grant = select(Action.id, Action.attempts, *(getattr(Action, name) for name in folding.HELD), bindparam("at", type_=Double()))
        grant = grant.where(*held, Action.attempts < bindparam("below"))
        names = ["action", "attempt", *folding.HELD, "released_at"]
        self.given_back = self._insert(EarlierGrant).from_select(names, grant).on_conflict_do_nothing()
        self.environment = self._latest(Environment, "id", keep=("created_at",), first=("opened_at",))
        self.node = self._latest(Node, "name", keep=("draining",), last=("joined_at",), where=_may_change_node)
        self.draining = update(table(Node)).where(Node.name == bindparam("of"), Node.shard == bindparam("in"))
        self.service = self._latest(Service, "name")
        self.forget = update(table(ServiceInstance)).where(ServiceInstance.node == bindparam("of"), ServiceInstance.state != ABSENT)
        gone = select(Node.name).where(Node.state.not_in(NODE_HELD), Node.changed_at < bindparam("before"))
        self.prune = delete(table(ServiceInstance)).where(ServiceInstance.node.in_(gone))
        self.instance = self._latest(ServiceInstance, "node", "service", "cells")
        self.failure = self._failure()

    def received_and_changed(self, shape: folding.Shape) -> Executable:
        """Return the insert that on a row that is there, and not ended, sets only the columns of `shape`."""
        statement = self._received_and_changed.get(shape)
        if statement is None:
            insert = self._insert(Action)
            columns = {name: insert.excluded[name] for name in sorted(shape)}
            statement = insert.on_conflict_do_update(index_elements=["id"], set_=columns, where=Action.ended_at.is_(None))
            self._received_and_changed[shape] = statement
        return statement

    def changed(self, shape: folding.Shape) -> Executable:
        """Return the update for actions that have not ended; the rows name its columns, all those of `shape`."""
        statement = self._changed.get(shape)
        if statement is None:
            statement = update(table(Action)).where(Action.id == bindparam("of"), Action.ended_at.is_(None))
            self._changed[shape] = statement
        return statement

    def _insert(self, model: type[Base]) -> Any:
        # The two dialects spell INSERT … ON CONFLICT alike but share no class.
        return self._dialect_insert(table(model))

    def _failure(self) -> Executable:
        """Return an insert that counts a failure on the row that is there, unless it is of an epoch that was counted."""
        insert = self._insert(FailedMessage)
        columns = {name: insert.excluded[name] for name in ("kind", "action", "epoch", "traceback", "failed_at")}
        counted = FailedMessage.failures + insert.excluded.failures
        statement: Executable = insert.on_conflict_do_update(
            index_elements=["message"], set_={**columns, "failures": counted}, where=FailedMessage.epoch < insert.excluded.epoch
        )
        return statement

    def _latest(
        self,
        model: type[Base],
        *key: str,
        keep: Sequence[str] = (),
        first: Sequence[str] = (),
        last: Sequence[str] = (),
        where: Callable[[Any], Any] = lambda given: None,
    ) -> Executable:
        """Return an insert that overrides the row that is there, if what is given fulfils `where`.

        Columns of `keep` stay, those of `first` stay once they are set, those of `last` stay where none is given.
        """
        insert = self._insert(model)
        columns: dict[str, Any] = {}
        for column in table(model).columns:
            given = insert.excluded[column.name]
            if column.name in first:
                given = func.coalesce(column, given)
            elif column.name in last:
                given = func.coalesce(given, column)
            if column.name not in key and column.name not in keep:
                columns[column.name] = given
        statement: Executable = insert.on_conflict_do_update(index_elements=key, set_=columns, where=where(insert.excluded))
        return statement


def _may_change_node(given: Any) -> Any:
    """Return whether a shard may change the row of a node: once that has joined another one, the shard before may not."""
    is_over = and_(*(Node.state != held for held in NODE_HELD))  # an IN does not go with many rows
    return or_(Node.shard == given.shard, given.state == NODE_UP, is_over)


def _passes(error: BaseException) -> bool:
    """Say whether an error of PostgreSQL is worth another try; SQLite waits for locks by itself."""
    if not isinstance(error, DBAPIError) or not hasattr(error.orig, "sqlstate"):
        return False
    # A broken connection has no server to name a state.
    return error.connection_invalidated or getattr(error.orig, "sqlstate", None) in (None, *PASSING_SQLSTATES)
