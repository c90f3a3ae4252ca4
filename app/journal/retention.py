"""Retention: what ended long ago leaves the journal, rolled up by the hour. Successes, of which there are most, go earlier than all else.

Rows are removed in small batches. Each batch is one transaction, which also adds the rows to the figures of their hours. So after a
crash a row is either still there or counted there. With a lease, only its holder removes anything. Between batches the journal has
the database for itself.

What other parts read stays, however old:

* the last successes, from which a starting scheduler learns (`TANGRAM_HISTORY`), and all that ended after the first of them;
* the actions and environments of recorded runs;
* the opens of pods that stand.

What ended in the last hour stays also in a journal that is too large: its message may come again.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Final, Self, TypeVar

from sqlalchemy import Connection, Engine, delete, func, insert, select, tuple_

from app.journal.database import DatabaseError, database_errors, shown, size_mb, writing
from app.journal.leader import Lease
from app.journal.models import (
    Action,
    ActionHour,
    AnyRow,
    EarlierGrant,
    Environment,
    EnvironmentHour,
    FailedMessage,
    Message,
    Node,
    Run,
    ServiceInstance,
    table,
)
from app.journal.rollup import PARTS, ActionFigures, Key, by_hour, hour_of
from app.journal.unfinished import ENDS_LOADED_S
from app.journal.writing import LeaseLost
from scheduler.model.lifecycle import NODE_HELD

log = logging.getLogger(__name__)

DAY_S: Final = 86_400.0
BATCH: Final = 200
"""Rows in one transaction. On SQLite it takes 12 ms (median), in which nobody else can write; on PostgreSQL 47 ms, in which all can."""

SHARE: Final = 0.2
"""Fraction of the time that removing may take while there is much to remove."""

FIRST_LOOK_S, LOOK_S = 10.0, 900.0
"""Seconds from the start of a scheduler to its first look for what is too old, and between two looks."""

Cursor = tuple[float, str]
"""The last row of a batch that was looked at: when it ended, and its id."""
RunSpan = tuple[frozenset[str], float, float]
"""The jobs of a recorded run, and when it started and ended."""

Step = Callable[[Connection], tuple[Cursor | None, int]]
"""Removes a batch; returns where it ended, None at the last one, and how many rows were removed."""

T = TypeVar("T")


class Retention:
    """Removes what ended more than `keep_days` ago, and actions that succeeded more than `keep_succeeded_days` ago.

    While the journal is larger than `most_mb`, the oldest successes go, too. `history` successes stay at least.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        keep_days: int,
        history: int,
        keep_succeeded_days: int | None = None,
        most_mb: float = 0.0,
        lease: Lease | None = None,
    ) -> None:
        self._engine = writing(engine)
        self._keep_s = keep_days * DAY_S
        self._keep_succeeded_s = self._keep_s if keep_succeeded_days is None else keep_succeeded_days * DAY_S
        self._most_mb = most_mb
        self._succeeded: Cursor = (float("-inf"), "")
        """The last success that was looked at: those before it are gone, or are of recorded runs."""
        self._history = history
        self._lease = lease

    def prune(self, now: float, wait: Callable[[float], bool] = lambda pause_s: False) -> int:
        """Remove what is too old, and return how many actions and environments that was.

        `wait` is called between two batches with a pause in seconds, and ends the work by returning true. Raises `DatabaseError` when the
        database cannot be reached or written; `LeaseLost` when another scheduler holds the lease.
        """
        before = now - self._keep_s
        first, runs = self._transaction(self._read_first)
        learned = math.inf if first is None else first
        self._transaction(partial(_remove_unreferenced, before=before))
        removed = 0
        for step, limit in ((partial(_remove_actions, runs), min(before, learned)), (partial(_remove_environments, runs), before)):
            cursor: Cursor | None = (float("-inf"), "")
            while cursor is not None:
                cursor, count, stopped = self._batch(partial(step, after=cursor, before=limit), wait)
                removed += count
                if stopped:
                    return removed
        by_age: tuple[float, Callable[[], bool]] = (now - self._keep_succeeded_s, lambda: True)
        by_size: tuple[float, Callable[[], bool]] = (now - ENDS_LOADED_S, self._is_too_large)
        for limit, goes_on in (by_age, by_size):
            while goes_on():
                step = partial(_remove_actions, runs, after=self._succeeded, before=min(limit, learned), succeeded=True)
                cursor, count, stopped = self._batch(step, wait)
                removed += count
                if stopped:
                    return removed
                if cursor is None:
                    break
                self._succeeded = cursor
        return removed

    def _batch(self, step: Step, wait: Callable[[float], bool]) -> tuple[Cursor | None, int, bool]:
        """Remove a batch, and pause; return where it ended, how many were removed, and whether to stop."""
        began = time.perf_counter()
        cursor, count = self._transaction(step)
        return cursor, count, wait((time.perf_counter() - began) * (1 / SHARE - 1))

    def _is_too_large(self) -> bool:
        return self._most_mb > 0 and self._transaction(size_mb) > self._most_mb

    def _transaction(self, work: Callable[[Connection], T]) -> T:
        with database_errors(self._engine.url), self._engine.begin() as connection:
            if self._lease is not None and not self._lease.held_in(connection):
                raise LeaseLost(f"{shown(self._engine.url)}: another scheduler has taken over, this one removes no more")
            return work(connection)

    def _read_first(self, connection: Connection) -> tuple[float | None, Sequence[RunSpan]]:
        """Return when the first of the successes ended that are learned from, and the recorded runs that were finished."""
        last = select(Action.ended_at).where(Action.status == "succeeded", Action.ended_at.is_not(None))
        last = last.order_by(Action.ended_at.desc(), Action.position.desc()).limit(self._history)
        finished = select(Run.jobs, Run.started_at, Run.ended_at).where(Run.ended_at.is_not(None))
        runs = [(frozenset(run.jobs), run.started_at, run.ended_at) for run in connection.execute(finished)]
        return connection.execute(select(func.min(last.subquery().c.ended_at))).scalar_one(), runs


class Pruning:
    """A thread that has `retention` remove what is too old, now and then, as long as the context lasts."""

    def __init__(self, retention: Retention, clock: Callable[[], float] = time.time) -> None:
        self._retention = retention
        self._clock = clock
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tangram-retention", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        pause_s = FIRST_LOOK_S
        while not self._stop.wait(pause_s):
            pause_s = LOOK_S
            try:
                removed = self._retention.prune(self._clock(), self._stop.wait)
            except LeaseLost:
                return
            except DatabaseError as error:
                log.warning("what is too old cannot be removed yet: %s", error)
            else:
                log.log(logging.INFO if removed else logging.DEBUG, "%d actions and environments were too old and are rolled up", removed)


def _remove_actions(
    runs: Sequence[RunSpan], connection: Connection, after: Cursor, before: float, succeeded: bool = False
) -> tuple[Cursor | None, int]:
    """Roll up and remove a batch of actions, only of those that succeeded where that is said.

    Returns where the batch ended, None at the last one, and how many were removed.
    """
    columns = (
        Action.id, Action.job, Action.kind, Action.action_class, Action.status, Action.submitted_at, Action.ended_at, Action.cause,
        Action.fault, *(getattr(Action, part) for part in PARTS), Action.cpu_s, Action.unit_s, Action.resource,
    )  # fmt: skip
    ended = (Action.ended_at.is_not(None), Action.ended_at >= after[0], Action.ended_at < before)
    query = select(*columns).where(*ended, tuple_(Action.ended_at, Action.id) > tuple_(*after))
    pods = select(Environment.id).where(Environment.id == Action.environment, Environment.ended_at.is_(None), Environment.pod_cores > 0)
    query = query.where(~((Action.kind == "cpu.open") & pods.exists()))
    if succeeded:
        query = query.where(Action.status == "succeeded")
    rows = connection.execute(query.order_by(Action.ended_at, Action.id).limit(BATCH)).all()
    old = [row for row in rows if not _is_of_run(row.job, row.submitted_at, runs)]
    if old:
        _add_action_hours(connection, by_hour(old))
        ids = [row.id for row in old]
        for model, action in ((EarlierGrant, EarlierGrant.action), (Message, Message.action)):
            connection.execute(delete(table(model)).where(action.in_(ids)))
        connection.execute(delete(table(Action)).where(Action.id.in_(ids)))
    return (rows[-1].ended_at, rows[-1].id) if len(rows) == BATCH else None, len(old)


def _add_action_hours(connection: Connection, found: dict[Key, ActionFigures]) -> None:
    key = tuple_(ActionHour.job, ActionHour.kind, ActionHour.action_class, ActionHour.hour, ActionHour.status)
    for row in connection.execute(select(table(ActionHour)).where(key.in_(found))).all():
        found[row.job, row.kind, row.action_class, row.hour, row.status].merge(ActionFigures.of_row(row))
    connection.execute(delete(table(ActionHour)).where(key.in_(found)))
    names = ("job", "kind", "action_class", "hour", "status")
    connection.execute(insert(table(ActionHour)), [dict(zip(names, key, strict=True)) | one.values() for key, one in found.items()])


def _remove_environments(runs: Sequence[RunSpan], connection: Connection, after: Cursor, before: float) -> tuple[Cursor | None, int]:
    """Do for environments what `_remove_actions` does for actions."""
    ended = (Environment.ended_at.is_not(None), Environment.ended_at >= after[0], Environment.ended_at < before)
    query = select(table(Environment)).where(*ended, tuple_(Environment.ended_at, Environment.id) > tuple_(*after))
    rows = connection.execute(query.order_by(Environment.ended_at, Environment.id).limit(BATCH)).all()
    old = [row for row in rows if not _is_of_run(row.job, row.created_at, runs)]
    if old:
        _add_environment_hours(connection, old)
        connection.execute(delete(table(Environment)).where(Environment.id.in_([row.id for row in old])))
    return (rows[-1].ended_at, rows[-1].id) if len(rows) == BATCH else None, len(old)


def _add_environment_hours(connection: Connection, old: Sequence[AnyRow]) -> None:
    counts: Counter[tuple[str, int, str]] = Counter()
    core_s: defaultdict[tuple[str, int, str], float] = defaultdict(float)
    for row in old:
        key = (row.job, hour_of(row.created_at), row.state)
        counts[key] += 1
        core_s[key] += row.pod_cores * (row.ended_at - row.opened_at) if row.opened_at is not None else 0.0
    columns = tuple_(EnvironmentHour.job, EnvironmentHour.hour, EnvironmentHour.state)
    for row in connection.execute(select(table(EnvironmentHour)).where(columns.in_(list(counts)))).all():
        counts[row.job, row.hour, row.state] += row.environments
        core_s[row.job, row.hour, row.state] += row.pod_core_s
    connection.execute(delete(table(EnvironmentHour)).where(columns.in_(list(counts))))
    rows = [
        {"job": job, "hour": hour, "state": state, "environments": count, "pod_core_s": core_s[job, hour, state]}
        for (job, hour, state), count in counts.items()
    ]
    connection.execute(insert(table(EnvironmentHour)), rows)


def _remove_unreferenced(connection: Connection, before: float) -> None:
    """Remove nodes that left or were lost, with what was known of their instances, and messages on which schedulers failed."""
    gone = select(Node.name).where(Node.state.not_in(NODE_HELD), Node.changed_at < before)
    connection.execute(delete(table(ServiceInstance)).where(ServiceInstance.node.in_(gone)))
    connection.execute(delete(table(Node)).where(Node.state.not_in(NODE_HELD), Node.changed_at < before))
    connection.execute(delete(table(FailedMessage)).where(FailedMessage.failed_at < before))


def _is_of_run(job: str, at: float, runs: Sequence[RunSpan]) -> bool:
    return any(started_at <= at <= ended_at and job in jobs for jobs, started_at, ended_at in runs)
