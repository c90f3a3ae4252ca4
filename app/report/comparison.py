"""Two runs or jobs side by side: the same figures of both, and by how much they differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from app.journal.figures import ActStats
from app.report.subject import Subject, labels
from app.report.tables import Table
from app.report.text import change, count, plain, seconds


class Measure(NamedTuple):
    """A figure that two subjects are compared by: its key in the document, and how a person reads it."""

    key: str
    words: str
    whole: bool = False


MEASURES: Final = (
    Measure("mean_act", "mean ACT, s"),
    Measure("p50_act", "p50 ACT, s"),
    Measure("p95_act", "p95 ACT, s"),
    Measure("p99_act", "p99 ACT, s"),
    Measure("mean_queue", "mean queueing, s"),
    Measure("mean_background", "mean time in the background, s"),
    Measure("mean_overhead", "mean overhead, s"),
    Measure("mean_execution", "mean execution, s"),
    Measure("duration", "first submission to last end, s"),
    Measure("core_s_reserved", "core-seconds reserved"),
    Measure("core_s_used", "core-seconds used"),
    Measure("actions", "actions", whole=True),
    Measure("not_succeeded", "not succeeded", whole=True),
    Measure("infrastructure", "by our fault", whole=True),
)


def measured(subject: Subject) -> dict[str, float]:
    """Return the figures of one subject, by key."""
    total = subject.figures.total
    return {
        **_act(total),
        "p50_act": total.act.p50,
        "p95_act": total.act.p95,
        "p99_act": total.act.p99,
        "duration": subject.ended - subject.began,
        "core_s_reserved": subject.figures.pod_or_grant_core_s,
        "core_s_used": total.core_s_used,
        "actions": sum(total.by_status.values()),
        "not_succeeded": total.not_succeeded,
        "infrastructure": subject.failed_by_us,
    }


def compare(subject: Subject, against: Subject) -> dict[str, Any]:
    """Return the comparison for `--json`: each figure of both, and the first over the second, null where that is 0."""
    both = measured(subject), measured(against)
    compared = {measure.key: _pair(both[0][measure.key], both[1][measure.key]) for measure in MEASURES}
    kinds = [kind for kind in subject.figures.by_kind if kind in against.figures.by_kind]
    by_kind = {
        kind: {key: _pair(value, _act(against.figures.by_kind[kind])[key]) for key, value in _act(subject.figures.by_kind[kind]).items()}
        for kind in kinds
    }
    return {**compared, "by_kind": by_kind}


def _act(stats: ActStats) -> dict[str, float]:
    return {
        "mean_act": stats.act.mean,
        "mean_queue": stats.mean_queue_s,
        "mean_background": stats.mean_background_s,
        "mean_overhead": stats.mean_overhead_s,
        "mean_execution": stats.mean_execution_s,
    }


def _pair(value: float, before: float) -> dict[str, float | None]:
    return {"run": value, "against": before, "ratio": value / before if before else None}


def verdict(subject: Subject, against: Subject | None) -> str:
    """Return what a report says, in a sentence: how a subject went, or how it differs from another one."""
    if against is None:
        total = subject.figures.total
        return (
            f"{count(sum(total.by_status.values()))} actions in {seconds(subject.ended - subject.began)} s, with a mean ACT of "
            f"{seconds(total.act.mean)} s, {seconds(total.mean_queue_s)} s of it queueing. {count(total.not_succeeded)} did not succeed, "
            f"{count(subject.failed_by_us)} of them by our fault."
        )
    these, those = measured(subject), measured(against)
    name, other = map(plain, labels(subject, against))
    differs = ", ".join(
        f"{words} {change(these[key], those[key]) or 'not to be compared'}"
        for key, words in (("mean_act", "mean ACT"), ("duration", "duration"), ("core_s_reserved", "core-seconds reserved"))
    )
    ours, theirs = count(these["infrastructure"]), count(those["infrastructure"])
    return f"{name} against {other}: {differs}; by our fault {ours} against {theirs} actions."


def comparison_table(document: Mapping[str, Any], names: tuple[str, str]) -> Table:
    """Return the comparison as a table."""
    rows = []
    for measure in MEASURES:
        pair = document[measure.key]
        shown = [_shown(measure, pair[side]) for side in ("run", "against")]
        rows.append((measure.words, *shown, change(pair["run"], pair["against"])))
    return Table(caption="All actions in the journal, with the opening and closing of environments", columns=_columns(names), rows=rows)


def kinds_table(document: Mapping[str, Any], names: tuple[str, str]) -> Table:
    """Return the mean ACT of both by kind."""
    rows = []
    for kind, pairs in document["by_kind"].items():
        act = pairs["mean_act"]
        queue = pairs["mean_queue"]
        shown = [seconds(pair[side]) for pair in (act, queue) for side in ("run", "against")]
        rows.append((plain(kind), *shown[:2], change(act["run"], act["against"]), *shown[2:]))
    first, second = (plain(name) for name in names)
    columns = ("kind", f"mean ACT s, {first}", f"{second}", "the first is", f"mean queueing s, {first}", f"{second}")
    return Table(caption="By kind of action", columns=columns, rows=rows)


_SUMMARY: Final = (
    *MEASURES[:7],
    Measure("step_duration", "step duration, s"),
    Measure("actions", "actions", whole=True),
    Measure("failed", "not succeeded", whole=True),
    Measure("resizes", "resizes", whole=True),
    Measure("restores", "restores", whole=True),
)


def replay_table(subject: Subject, against: Subject) -> Table | None:
    """Return what two replays themselves measured; None where one of the subjects is no replay, or has not ended."""
    summaries = [each.run.summary for each in (subject, against) if each.run is not None and each.run.summary is not None]
    if len(summaries) < 2:
        return None
    rows = []
    for measure in _SUMMARY:
        value, before = (float(summary.get(measure.key, 0.0)) for summary in summaries)
        rows.append((measure.words, _shown(measure, value), _shown(measure, before), change(value, before)))
    caption = "As the trainer saw it, without the opening and closing of environments"
    return Table(caption=caption, columns=_columns(labels(subject, against)), rows=rows)


def _shown(measure: Measure, value: float) -> str:
    return count(value) if measure.whole else seconds(value)


def _columns(names: tuple[str, str]) -> tuple[str, ...]:
    return ("figure", plain(names[0]), plain(names[1]), "the first is")
