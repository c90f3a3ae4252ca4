"""The tables of a report, as text: what the pictures show, in figures, and what no picture shows."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from app.journal.figures import ActStats
from app.journal.models import Action
from app.journal.recent import INFRASTRUCTURE
from app.journal.rollup import PARTS
from app.report.subject import Subject
from app.report.text import count, plain, seconds, share
from scheduler.model.stats import mean, summary

MOST_CLASSES: Final = 40
MOST_SLOWEST: Final = 20
MOST_UNFINISHED: Final = 10
MOST_ENDS: Final = 40
FAULTS: Final = {INFRASTRUCTURE: "infrastructure (ours)", "program": "program", "caller": "caller", "": "not known"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table: the first `words` columns are words, the others figures, set to the right."""

    caption: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    words: int = 1
    left_out: str = ""


_PART_COLUMNS = ("queueing s", "background s", "overhead s", "execution s")
_ACT_COLUMNS = ("actions", "not succeeded", "mean ACT s", "p50 s", "p95 s", "p99 s", *_PART_COLUMNS)


def act_table(caption: str, first: str, groups: Mapping[str, ActStats]) -> Table:
    """Return the ACT figures of groups of actions."""
    rows = [(plain(name), *_act_cells(stats), seconds(stats.core_s_used)) for name, stats in groups.items()]
    return Table(caption=caption, columns=(first, *_ACT_COLUMNS, "CPU core-s"), rows=rows)


def _act_cells(stats: ActStats) -> tuple[str, ...]:
    act, parts = stats.act, (stats.mean_queue_s, stats.mean_background_s, stats.mean_overhead_s, stats.mean_execution_s)
    figures = (act.mean, act.p50, act.p95, act.p99, *parts)
    return (count(sum(stats.by_status.values())), count(stats.not_succeeded), *map(seconds, figures))


ClassKey = tuple[str, str, str]


def by_class(subject: Subject) -> dict[ClassKey, list[Action]]:
    """Return the actions carried out by job, kind and class, those first on which most time went."""
    found: defaultdict[ClassKey, list[Action]] = defaultdict(list)
    for action in subject.carried_out:
        found[action.job, action.kind, action.action_class].append(action)
    return dict(sorted(found.items(), key=lambda group: -sum(action.act_s or 0.0 for action in group[1])))


def class_table(subject: Subject) -> Table:
    """Return the ACT figures of each job's classes."""
    groups = by_class(subject)
    rows = []
    for (job, kind, name), actions in list(groups.items())[:MOST_CLASSES]:
        act = summary(action.act_s or 0.0 for action in actions)
        parts = [mean([getattr(action, part) or 0.0 for action in actions]) for part in PARTS[1:]]
        failed = sum(action.status != "succeeded" for action in actions)
        figures = (act.mean, act.p50, act.p95, act.p99, *parts, sum(action.cpu_s or 0.0 for action in actions))
        rows.append((plain(job), kind, plain(name), count(len(actions)), count(failed), *(seconds(value) for value in figures)))
    left_out = ""
    if len(groups) > MOST_CLASSES:
        rest = sum(len(actions) for actions in list(groups.values())[MOST_CLASSES:])
        left_out = f"{len(groups) - MOST_CLASSES} more classes with {count(rest)} actions, on which less time went"
    columns = ("job", "kind", "class", *_ACT_COLUMNS, "CPU core-s")
    return Table(caption="By job and class, most time first", columns=columns, rows=rows, words=3, left_out=left_out)


def slowest_table(subject: Subject) -> Table:
    """Return the actions with the longest ACT."""
    slowest = sorted(subject.carried_out, key=lambda action: -(action.act_s or 0.0))[:MOST_SLOWEST]
    rows = [
        (
            *_who(action),
            plain(action.node or ""),
            action.status,
            *(seconds(getattr(action, part) or 0.0) for part in (*PARTS, "cpu_s")),
            str(action.units or ""),
            f"{action.submitted_at - subject.began:.1f}",
        )
        for action in slowest
    ]
    figures = ("ACT s", *_PART_COLUMNS, "CPU core-s", "units", "submitted at s")
    columns = ("action", "job", "trajectory", "kind", "class", "node", "end", *figures)
    return Table(caption=f"The {len(rows)} slowest actions", columns=columns, rows=rows, words=7)


def unfinished_table(subject: Subject) -> Table:
    """Return the actions that have not ended, the oldest first."""
    unfinished = subject.unfinished
    rows = [
        (*_who(action), plain(action.node or ""), action.status, seconds(subject.now - action.submitted_at), plain(action.reason))
        for action in unfinished[:MOST_UNFINISHED]
    ]
    more = len(unfinished) - len(rows)
    columns = ("action", "job", "trajectory", "kind", "class", "node", "state", "age s", "reason")
    left_out = f"{count(more)} younger ones" if more else ""
    return Table(caption="Not ended yet, the oldest first", columns=columns, rows=rows, words=7, left_out=left_out)


def _who(action: Action) -> tuple[str, ...]:
    return (action.id, plain(action.job), plain(action.trajectory), action.kind, plain(action.action_class))


def memory_table(subject: Subject) -> Table:
    """Return for each job the limits that its environments declared beside the memory that they were measured to use, MB."""
    most: defaultdict[str, dict[str, int]] = defaultdict(dict)
    between: defaultdict[str, list[int]] = defaultdict(list)
    for action in subject.history.actions:
        environment = action.environment or ""
        if action.memory_mb is not None and environment in subject.history.limits:
            held = most[action.job]
            held[environment] = max(held.get(environment, 0), action.memory_mb)
            between[action.job] += [action.resident_mb] if action.resident_mb is not None else []
    rows = []
    for job, held in sorted(most.items()):
        limits = [subject.history.limits[environment] for environment in held]
        used = summary(held.values())
        figures = (mean(limits), mean(between[job]), used.p50, used.p95, float(max(held.values())))
        rows.append((plain(job), count(len(held)), *(f"{value:,.0f}" for value in figures)))
    columns = ("job", "environments", "declared MB, mean", "held between actions, mean", "most held, p50", "p95", "most")
    return Table(caption="Memory declared and used", columns=columns, rows=rows)


EndKey = tuple[str, str, str]


def ends(subject: Subject) -> list[tuple[EndKey, int, Action]]:
    """Return how actions ended where not all went well: fault, cause and end, how many, and the last of them; ours first."""
    counts: Counter[EndKey] = Counter()
    last: dict[EndKey, Action] = {}
    for action in subject.not_all_well:
        key = (action.fault, action.cause, action.status)
        counts[key] += 1
        last[key] = action
    return sorted(((key, number, last[key]) for key, number in counts.items()), key=lambda end: (end[0][0] != INFRASTRUCTURE, -end[1]))


def ends_table(subject: Subject) -> Table:
    """Return the ends that have a cause, by whose fault it was."""
    found = ends(subject)
    total = len(subject.history.actions)
    rows = [
        (FAULTS.get(fault, fault), plain(cause), status, plain(last.reason), plain(last.job), count(number), share(number, total))
        for (fault, cause, status), number, last in found[:MOST_ENDS]
    ]
    columns = ("fault", "cause", "end", "reason of the last one", "its job", "actions", "of all")
    left_out = f"{len(found) - MOST_ENDS} rarer causes" if len(found) > MOST_ENDS else ""
    return Table(caption="Ends by fault and cause", columns=columns, rows=rows, words=5, left_out=left_out)


def series_table(caption: str, first: str, names: Sequence[str], rows: Iterable[tuple[str, Sequence[float]]], digits: int = 2) -> Table:
    """Return the figures of lines over time."""
    written = [(head, *(f"{value:,.{digits}f}" for value in values)) for head, values in rows]
    return Table(caption=caption, columns=(first, *(plain(name) for name in names)), rows=written)
