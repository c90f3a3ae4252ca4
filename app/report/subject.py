"""What a report is about: a run or a job, with its actions, what they held, and its figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import Engine

from app.journal.database import snapshot
from app.journal.figures import CARRIED_OUT, ActReport, Selection, act_report_in
from app.journal.history import History, history
from app.journal.models import Action, Grant
from app.journal.recent import INFRASTRUCTURE
from app.journal.runs import RunRecord
from tangram.action import CORES


class Span(NamedTuple):
    """An amount from one time to another, in seconds since the epoch."""

    start: float
    end: float
    amount: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A run or a job at the time `now`.

    `began` is the first submission, `ended` the last end; where something has not ended it is `now`. `key` names it among the subjects of
    a page, in letters that may stand anywhere.
    """

    key: str
    name: str
    run: RunRecord | None
    history: History
    figures: ActReport
    began: float
    ended: float
    now: float

    @property
    def label(self) -> str:
        """A short name."""
        return f"{self.run.policy} ({self.name})" if self.run is not None else self.name

    @property
    def title(self) -> str:
        """A name for headings."""
        return f"run {self.name}: {self.run.policy} on {Path(self.run.trace).name}" if self.run is not None else f"job {self.name}"

    @property
    def carried_out(self) -> list[Action]:
        """The actions whose ACT counts."""
        return [action for action in self.history.actions if action.status in CARRIED_OUT]

    @property
    def unfinished(self) -> list[Action]:
        """The actions that have not ended."""
        return [action for action in self.history.actions if action.ended_at is None]

    @property
    def failed_by_us(self) -> int:
        """How many actions ended by a fault of the infrastructure, with those that retention has left only as figures of an hour."""
        return self.figures.total.by_fault.get(INFRASTRUCTURE, 0)

    @property
    def not_all_well(self) -> list[Action]:
        """The actions whose end somebody is to blame for, also by an exit code other than 0; and bad ends whose cause is not known."""
        ended = [action for action in self.history.actions if action.ended_at is not None]
        return [action for action in ended if action.fault or (action.status != "succeeded" and not action.cause)]

    @property
    def rolled_up(self) -> int:
        """The number of actions that retention has left only as figures of an hour."""
        return sum(self.figures.total.by_status.values()) - len(self.history.actions)

    def document(self) -> dict[str, Any]:
        """Return the figures for `--json`."""
        about: dict[str, Any] = {"run": asdict(self.run)} if self.run is not None else {"job": self.name}
        return {**about, **asdict(self.figures)}


def read_subject(engine: Engine, name: str, run: RunRecord | None, selection: Selection, now: float, key: str = "run") -> Subject:
    """Read a run, or the job `name`. Raises `DatabaseError` when the journal cannot be read."""
    # One snapshot, so that each action is in both or in none.
    with snapshot(engine) as connection:
        past, figures = history(connection, selection), act_report_in(connection, selection)
    began = min((action.submitted_at for action in past.actions), default=run.started_at if run is not None else now)
    ends = [now if action.ended_at is None else action.ended_at for action in past.actions]
    ended = max(ends, default=began)
    return Subject(key=key, name=name, run=run, history=past, figures=figures, began=began, ended=ended, now=now)


def waits(subject: Subject) -> Iterator[tuple[Action, Span]]:
    """Give the times in which an action held no grant though it had been submitted and had not ended."""
    grants: dict[str, list[Grant]] = {}
    for grant in subject.history.grants:
        grants.setdefault(grant.action, []).append(grant)
    for action in subject.history.actions:
        free_at = action.submitted_at
        for grant in grants.get(action.id, ()):
            if grant.granted_at > free_at:
                yield action, Span(free_at, grant.granted_at, 1.0)
            free_at = subject.ended if grant.released_at is None else grant.released_at
        ended_at = subject.ended if action.ended_at is None else action.ended_at
        # What is left after the last grant is the moment until its end is noted, unless it waits again.
        if free_at < ended_at and (action.granted_at is None or action.status == "waiting"):
            yield action, Span(free_at, ended_at, 1.0)


def background_waits(subject: Subject) -> Iterator[Span]:
    """Give the time for which commands wanted a core in the background and had none, spread evenly over their runs."""
    for action in subject.history.actions:
        if action.background_s and action.granted_at is not None and action.ended_at is not None and action.ended_at > action.granted_at:
            yield Span(action.granted_at, action.ended_at, action.background_s / (action.ended_at - action.granted_at))


def holdings(subject: Subject, resource: str) -> Iterator[tuple[Action, Span]]:
    """Give the cores or cells that actions held.

    Before a resize it is the mean that follows from the unit-seconds of the whole action; in the background it is nothing.
    """
    actions = {action.id: action for action in subject.history.actions}
    for grant in subject.history.grants:
        if grant.resource != resource:
            continue
        action = actions[grant.action]
        end = subject.ended if grant.released_at is None else grant.released_at
        units = 0 if grant.background else grant.units
        if grant.resized_at is None:
            yield action, Span(grant.granted_at, end, units)
            continue
        yield action, Span(grant.resized_at, end, units)
        earlier_s = grant.resized_at - grant.granted_at
        if earlier_s > 0:
            known = action.unit_s is not None and action.attempts == 1
            later_s = end - grant.resized_at if action.ended_at is not None else 0.0  # before its end, `unit_s` is that until the resize
            held = ((action.unit_s or 0.0) - units * later_s) / earlier_s if known else float(grant.units)
            yield action, Span(grant.granted_at, grant.resized_at, max(0.0, held))


def used_cores(subject: Subject) -> Iterator[Span]:
    """Give the core-seconds that ended actions used, spread evenly over the time from their start to their end."""
    for action in subject.history.actions:
        start = action.started_at if action.started_at is not None else action.granted_at
        if action.cpu_s and start is not None and action.ended_at is not None and action.ended_at > start:
            yield Span(start, action.ended_at, action.cpu_s / (action.ended_at - start))


def pods(subject: Subject) -> Iterator[Span]:
    """Give the cores that environments held for themselves."""
    for pod in subject.history.pods:
        yield Span(pod.opened_at, subject.ended if pod.ended_at is None else pod.ended_at, len(pod.core_ids))


def labels(subject: Subject, against: Subject) -> tuple[str, str]:
    """Return short names that tell two subjects apart: their policies where these differ."""
    runs = subject.run, against.run
    if runs[0] is not None and runs[1] is not None and runs[0].policy != runs[1].policy:
        return runs[0].policy, runs[1].policy
    return subject.label, against.label


def capacity(subject: Subject, resource: str) -> int:
    """Return the cores or cells of all nodes that the actions ran on."""
    return sum(node.cores if resource == CORES else node.cells for node in subject.history.nodes.values())
