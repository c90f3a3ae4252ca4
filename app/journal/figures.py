"""Figures of ended actions, for reports and for learning.

ACT figures count the actions that were carried out (`CARRIED_OUT`): a cancelled, rejected or lost action has no completion whose time
could be compared. Durations are seconds, times seconds since the epoch. Every function raises `DatabaseError` when the database cannot
be read. Totals count what retention has rolled up (`app/journal/rollup.py`), too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, Select, false, func, select
from sqlalchemy.orm import InstrumentedAttribute

from app.journal.database import database_errors, snapshot
from app.journal.models import (
    DECLARED,
    Action,
    ActionHour,
    AnyRow,
    Environment,
    EnvironmentHour,
    header_of,
    table,
)
from app.journal.rollup import HOUR_S, PARTS, ActionFigures, merged_mean, merged_summary
from app.journal.runs import RunRecord
from scheduler.learning.durations import MEASURED, Observation
from scheduler.model.copied import filled
from scheduler.model.lifecycle import ACTION
from scheduler.model.stats import Summary
from tangram.action import CELLS, CORES
from tangram.action import Action as Declared
from tangram.ends import fault_of

CARRIED_OUT = ("succeeded", "failed", "timed_out")

_Column = ColumnElement[Any] | InstrumentedAttribute[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which actions a question is about; an absent field selects all. Times are those of submission.

    Of what was rolled up, whole hours between `since` and `until` count, and nothing where there is a `trajectory`.
    """

    jobs: tuple[str, ...] | None = None
    trajectory: str | None = None
    kind: str | None = None
    since: float | None = None
    until: float | None = None

    @classmethod
    def of_run(cls, run: RunRecord) -> Selection:
        """Select the actions of `run`."""
        return cls(jobs=run.jobs, since=run.started_at, until=run.ended_at if run.ended_at is not None else run.followed_at)


EVERYTHING = Selection()


@dataclass(frozen=True, slots=True, kw_only=True)
class ActStats:
    """ACT figures of a group of actions.

    `by_status` counts all of them, `by_cause` and `by_fault` those whose end somebody is to blame for (`tangram/ends.py`).
    `act` and the means are over those carried out. `core_s_reserved` and `cell_s_reserved` are units times the time that grants held them,
    resizes included; `core_s_used` is CPU time.
    """

    by_status: Mapping[str, int]
    by_cause: Mapping[str, int]
    by_fault: Mapping[str, int]
    act: Summary
    mean_queue_s: float
    mean_background_s: float
    mean_overhead_s: float
    mean_execution_s: float
    core_s_reserved: float
    cell_s_reserved: float
    core_s_used: float

    @property
    def not_succeeded(self) -> int:
        """How many actions ended otherwise than as wanted."""
        return sum(count for status, count in self.by_status.items() if status in ACTION.ends and status != "succeeded")


@dataclass(frozen=True, slots=True, kw_only=True)
class ActReport:
    """ACT figures of a selection: of all its actions, by kind and by job.

    `pod_core_s` are core-seconds that environments held for themselves, whether an action ran or not; grants
    inside such pods are in `core_s_reserved` as well.
    """

    total: ActStats
    by_kind: Mapping[str, ActStats]
    by_job: Mapping[str, ActStats]
    pod_core_s: float

    @property
    def pod_or_grant_core_s(self) -> float:
        """Core-seconds of pods, which include the grants inside them, if there were pods; else core-seconds of grants.

        With pods, grants to actions without an environment are left out.
        """
        return self.pod_core_s or self.total.core_s_reserved


def act_report(engine: Engine, selection: Selection = EVERYTHING) -> ActReport:
    """Return the ACT figures of the selected actions."""
    with snapshot(engine) as connection:
        return act_report_in(connection, selection)


def act_report_in(connection: Connection, selection: Selection) -> ActReport:
    """Return what `act_report` does, from a snapshot that other questions share."""
    columns = (Action.kind, Action.job, Action.status, Action.cause, Action.fault, Action.cpu_s, *(getattr(Action, part) for part in PARTS))
    where = conditions_of(selection)
    total = _Group()
    by_kind, by_job = defaultdict[str, _Group](_Group), defaultdict[str, _Group](_Group)

    def groups(row: AnyRow) -> tuple[_Group, _Group, _Group]:
        return total, by_kind[row.kind], by_job[row.job]

    for row in connection.execute(select(*columns).where(*where)):
        for group in groups(row):
            group.add(row)
    for hour in connection.execute(select(table(ActionHour)).where(*_whole_hours(selection, ActionHour))):
        if selection.kind in (None, hour.kind):
            for group in groups(hour):
                group.add_hour(hour)
    held = func.sum(Action.unit_s)
    reserved = (
        select(Action.kind, Action.job, Action.resource, held)
        .where(Action.resource.in_((CORES, CELLS)), Action.ended_at.is_not(None), *where)
        .group_by(Action.kind, Action.job, Action.resource)
    )
    for kind, job, resource, seconds in connection.execute(reserved):
        for group in (total, by_kind[kind], by_job[job]):
            group.reserved[resource] += seconds or 0.0
    pods: float | None = connection.execute(_pod_core_s(selection)).scalar_one()
    rolled_up = select(func.sum(EnvironmentHour.pod_core_s)).where(*_whole_hours(selection, EnvironmentHour))
    earlier_pods: float | None = connection.execute(rolled_up).scalar_one()
    return ActReport(
        total=total.stats(),
        by_kind={kind: group.stats() for kind, group in sorted(by_kind.items())},
        by_job={job: group.stats() for job, group in sorted(by_job.items())},
        pod_core_s=(pods or 0.0) + (earlier_pods or 0.0),
    )


def observations(
    engine: Engine, limit: int = 20_000, of_run: RunRecord | None = None, between: Callable[[], object] = lambda: None
) -> list[Observation]:
    """Return the last `limit` actions that succeeded, oldest first; with `of_run`, only those of a run.

    Very many take long, so `between` is called before each.
    """
    columns = (
        *DECLARED, Action.attempts, Action.granted_at, Action.ended_at, Action.units, Action.unit_s, Action.execution_s, Action.cpu_s,
    )  # fmt: skip
    ended = (Action.status == "succeeded", Action.ended_at.is_not(None))
    wanted = ended if of_run is None else (*ended, *conditions_of(Selection.of_run(of_run)))
    query = select(*columns).where(*wanted).order_by(Action.ended_at.desc(), Action.position.desc()).limit(limit)
    with database_errors(engine.url), engine.connect() as connection:
        rows = connection.execute(query).all()
    found = []
    for row in reversed(rows):
        between()
        found.append(_observation(row))
    return found


def _observation(row: AnyRow) -> Observation:
    action = Declared.from_header(header_of(row))
    held_s = row.ended_at - row.granted_at if row.granted_at is not None else 0.0
    # What earlier tries held is in `unit_s`, too, but not for how long.
    known = row.attempts == 1 and row.unit_s and held_s > 0
    return filled(
        Observation,
        action,
        held_units=row.unit_s / held_s if known else float(row.units),
        execution_s=row.execution_s,
        cpu_s=row.cpu_s if action.kind == MEASURED else None,
    )


@dataclass(slots=True)
class _Group:
    by_status: Counter[str] = field(default_factory=Counter)
    by_cause: Counter[str] = field(default_factory=Counter)
    parts: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})
    cpu_s: float = 0.0
    reserved: dict[str, float] = field(default_factory=lambda: {CORES: 0.0, CELLS: 0.0})
    rolled_up: ActionFigures = field(default_factory=ActionFigures)

    def add(self, row: AnyRow) -> None:
        self.by_status[row.status] += 1
        if row.fault:
            self.by_cause[row.cause] += 1
        self.cpu_s += row.cpu_s or 0.0
        if row.status in CARRIED_OUT:
            for part, seconds in self.parts.items():
                seconds.append(getattr(row, part) or 0.0)

    def add_hour(self, row: AnyRow) -> None:
        self.by_status[row.status] += row.actions
        self.by_cause.update(row.causes)
        self.cpu_s += row.cpu_s
        self.reserved[CORES] += row.core_s
        self.reserved[CELLS] += row.cell_s
        if row.status in CARRIED_OUT:
            self.rolled_up.merge(ActionFigures.of_row(row))

    def stats(self) -> ActStats:
        by_fault: Counter[str] = Counter()
        for cause, count in self.by_cause.items():
            by_fault[fault_of(cause)] += count
        return ActStats(
            by_status=dict(sorted(self.by_status.items())),
            by_cause=dict(sorted(self.by_cause.items())),
            by_fault=dict(sorted(by_fault.items())),
            act=merged_summary(self.parts["act_s"], self.rolled_up, "act_s"),
            **{f"mean_{part}": merged_mean(self.parts[part], self.rolled_up, part) for part in PARTS if part != "act_s"},
            core_s_reserved=self.reserved[CORES],
            cell_s_reserved=self.reserved[CELLS],
            core_s_used=self.cpu_s,
        )


def conditions_of(selection: Selection) -> list[ColumnElement[bool]]:
    """Return what holds of the selected actions' rows."""
    of_kind = [Action.kind == selection.kind] if selection.kind is not None else []
    return [*_conditions(selection, Action.job, Action.trajectory, Action.submitted_at, Action.submitted_at), *of_kind]


def _whole_hours(selection: Selection, hours: type[ActionHour | EnvironmentHour]) -> list[ColumnElement[bool]]:
    return _conditions(selection, hours.job, None, hours.hour, hours.hour + HOUR_S)


def _conditions(selection: Selection, job: _Column, trajectory: _Column | None, first: _Column, last: _Column) -> list[ColumnElement[bool]]:
    """Return what holds of rows from `first` to `last`, times in each row; a row without a trajectory is of none that is selected."""
    given = (
        (selection.jobs, lambda jobs: job.in_(jobs)),
        (selection.trajectory, lambda name: false() if trajectory is None else trajectory == name),
        (selection.since, lambda since: first >= since),
        (selection.until, lambda until: last <= until),
    )
    return [condition(value) for value, condition in given if value is not None]


def _pod_core_s(selection: Selection) -> Select[Any]:
    ended = (Environment.ended_at.is_not(None), Environment.opened_at.is_not(None), Environment.pod_cores > 0)
    created_at = Environment.created_at
    selected = _conditions(selection, Environment.job, Environment.trajectory, created_at, created_at)
    return select(func.sum(Environment.pod_cores * (Environment.ended_at - Environment.opened_at))).where(*ended, *selected)
