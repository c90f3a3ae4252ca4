"""The environments that have not ended: whose they are, how old, what runs in them, and which are orphans.

An *orphan* may have nobody who will close it. There are two sorts:

| it goes with | it is an orphan once |
|---|---|
| a client | that has given no sign of life for `SILENCE_S` |
| nobody: it was opened detached, by a gateway for example | its job has no action that waits or runs, and none has ended for `IDLE_JOB_S` |

Both end by themselves: the first after `TANGRAM_ORPHAN_S`, the second with its lease.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, Engine, Row, func, select

from app.journal.database import snapshot
from app.journal.models import RUNNING, Action, Environment, table
from scheduler.model.copied import filled

SILENCE_S: Final = 10.0
"""Silence of a client from which on its environments count as orphans: it misses five signs of life."""

IDLE_JOB_S: Final = 600.0
"""Time without any action of a job from which on its detached environments count as orphans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentStatus:
    """An environment that has not ended.

    `owner` is what its client calls itself. `client` is the id of the client that it goes with, empty where it is detached.
    `lease_left_s` is absent while it does not stand. `running` are the ids of the actions that run in it. `orphan` says why it is an
    orphan, and is empty where it is none.
    """

    id: str
    job: str
    trajectory: str
    owner: str
    client: str
    node: str
    state: str
    age_s: float
    lease_left_s: float | None
    running: tuple[str, ...]
    orphan: str


Silences = Callable[[Sequence[str]], Mapping[str, float | None]]
"""Returns for how many seconds clients have given no sign of life, None for those of which none is known."""


def environments(engine: Engine, now: float, silences: Silences, *, job: str | None, lease_s: float) -> list[EnvironmentStatus]:
    """Return the environments that have not ended at `now`, the oldest first; those of `job`, where that is given.

    `lease_s` is the system's lease, for those without one of their own. Raises `DatabaseError`, and what `silences` raises.
    """
    with snapshot(engine) as connection:
        rows = _standing(connection, job)
        running = _running(connection)
        idle_s = _idle_jobs(connection, {row.job for row in rows if not row.client}, now)
    silent_s = silences(sorted({row.client for row in rows if row.client}))
    return [
        filled(
            EnvironmentStatus,
            row,
            client=row.client or "",
            node=row.node or "",
            age_s=max(0.0, now - row.created_at),
            lease_left_s=lease_left(row, now, lease_s, is_used=bool(running[row.id])),
            running=tuple(running[row.id]),
            orphan=_why_orphan(row, silent_s, idle_s),
        )
        for row in rows
    ]


def _standing(connection: Connection, job: str | None) -> Sequence[Row[Any]]:
    query = select(table(Environment)).where(Environment.ended_at.is_(None)).order_by(Environment.created_at, Environment.id)
    return connection.execute(query if job is None else query.where(Environment.job == job)).all()


def _running(connection: Connection) -> Mapping[str, list[str]]:
    found: defaultdict[str, list[str]] = defaultdict(list)
    unended = (Action.ended_at.is_(None), Action.status == RUNNING, Action.environment.is_not(None))
    for environment, action in connection.execute(select(Action.environment, Action.id).where(*unended).order_by(Action.position)):
        found[environment or ""].append(action)
    return found


def _idle_jobs(connection: Connection, jobs: set[str], now: float) -> Mapping[str, float]:
    """Return for how long jobs have had no action at all; those that have one are not among them."""
    busy = set(connection.execute(select(Action.job).where(Action.ended_at.is_(None)).distinct()).scalars())
    last = select(Action.job, func.max(Action.ended_at)).where(Action.job.in_(jobs - busy), Action.ended_at.is_not(None))
    return {job: now - (ended_at or now) for job, ended_at in connection.execute(last.group_by(Action.job))}


def lease_left(row: Row[Any], now: float, lease_s: float | None, *, is_used: bool) -> float | None:
    """Return for how many seconds the lease of an environment, a row of `environments`, still goes; None where it has none.

    `lease_s` is the system's lease, and `is_used` says whether an action runs there: both matter only to those without a lease of their
    own. One that does not stand has none.
    """
    if row.state != "open":
        return None
    if row.ends_at is not None:
        ends_at: float = row.ends_at
    elif lease_s is not None:
        ends_at = lease_s + (now if is_used or row.used_at is None else row.used_at)
    else:
        return None
    return max(0.0, ends_at - now)


def _why_orphan(row: Row[Any], silent_s: Mapping[str, float | None], idle_s: Mapping[str, float]) -> str:
    if row.client:
        silence_s = silent_s.get(row.client)
        if silence_s is None:
            return "its client is not known to the result store"
        return f"its client gave no sign of life for {silence_s:.0f} s" if silence_s > SILENCE_S else ""
    idle = idle_s.get(row.job, 0.0)
    return f"its job has had no action for {idle:.0f} s" if idle > IDLE_JOB_S else ""
