"""Runs: what a replay or benchmark writes down about itself, so that `tangram report RUN` finds it again.

A run's actions are not marked; they are those of its jobs submitted between its start and its end. A run that was broken off has no end;
its actions are those until the next run that shares a job with it.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Engine, Row, insert, select, update

from app.journal.database import DatabaseError, database_errors, writing
from app.journal.models import Run, table
from scheduler.model.copied import filled

RUNS = table(Run)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One run; `ended_at` and `summary` are absent while it goes on or where it was broken off. Epoch seconds.

    `followed_at` is when the next run of one of the jobs began; it is looked up for a run without an end alone.
    """

    id: str
    policy: str
    trace: str
    jobs: tuple[str, ...]
    options: Mapping[str, Any]
    summary: Mapping[str, Any] | None
    started_at: float
    ended_at: float | None
    followed_at: float | None = None


def start_run(engine: Engine, *, policy: str, trace: str, jobs: Sequence[str], options: Mapping[str, Any], started_at: float) -> str:
    """Write down that a run begins and return its id, 8 hexadecimal digits. Raises `DatabaseError` when it cannot be written."""
    run_id = uuid.uuid4().hex[:8]
    row = {"id": run_id, "policy": policy, "trace": trace, "jobs": sorted(jobs), "options": dict(options), "started_at": started_at}
    with database_errors(engine.url), writing(engine).begin() as connection:
        connection.execute(insert(RUNS), row)
    return run_id


def finish_run(engine: Engine, run_id: str, *, summary: Mapping[str, Any], ended_at: float) -> None:
    """Write down how a run ended. Raises `DatabaseError` when there is no such run or it cannot be written."""
    with database_errors(engine.url), writing(engine).begin() as connection:
        change = update(RUNS).where(Run.id == run_id).values(summary=dict(summary), ended_at=ended_at)
        if connection.execute(change).rowcount == 0:
            raise DatabaseError(f"no run {run_id!r}")


def load_run(engine: Engine, run_id: str) -> RunRecord:
    """Return the run `run_id`; `last` means the one that began last.

    Raises `DatabaseError` when there is no such run or it cannot be read.
    """
    query = select(RUNS).order_by(Run.started_at.desc()).limit(1)
    if run_id != "last":
        query = query.where(Run.id == run_id)
    with database_errors(engine.url), engine.connect() as connection:
        row = connection.execute(query).one_or_none()
        followed_at = _followed_at(connection, row) if row is not None and row.ended_at is None else None
    if row is None:
        raise DatabaseError("no runs yet" if run_id == "last" else f"no run {run_id!r}")
    return filled(RunRecord, row, jobs=tuple(row.jobs), followed_at=followed_at)


def _followed_at(connection: Connection, run: Row[*tuple[Any, ...]]) -> float | None:
    """Return when the next run began that shares a job with `run`."""
    later = select(Run.jobs, Run.started_at).where(Run.started_at > run.started_at).order_by(Run.started_at)
    return next((started_at for jobs, started_at in connection.execute(later) if not set(run.jobs).isdisjoint(jobs)), None)
