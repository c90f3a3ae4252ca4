"""The pictures of a report, as plotly.js takes them: `data` and `layout`, and beside them the same in a table.

Colours are readable on a dark and on a light ground; what depends on the ground is set by `page.js`. Labels go through `in_picture`, and
places on an axis are numbers: plotly.js takes names that look like dates for dates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from app.journal.figures import ActStats
from app.journal.models import Action
from app.journal.recent import INFRASTRUCTURE
from app.report.series import Clock, clock, held, middles, percentiles, rounded, stretches
from app.report.subject import Span, Subject, background_waits, capacity, holdings, labels, pods, used_cores, waits
from app.report.tables import FAULTS, Table, ends, series_table
from app.report.text import in_picture, seconds
from tangram.action import CELLS, CORES

QUEUE, BACKGROUND, OVERHEAD, EXECUTION, ACT = "#d97706", "#e6b566", "#8b95a5", "#2f9e8f", "#5b7cfa"
PARTS: Final = (
    ("ACT", "act_s", ACT),
    ("queueing", "queue_s", QUEUE),
    ("background", "background_s", BACKGROUND),
    ("overhead", "overhead_s", OVERHEAD),
    ("execution", "execution_s", EXECUTION),
)
KIND_COLOURS: Final = {
    "cpu.exec": "#5b7cfa",
    "cpu.open": "#8b95a5",
    "cpu.close": "#b07d62",
    "cpu.read_file": "#4aa8c0",
    "cpu.write_file": "#7a9a3a",
    "cpu.request": "#a8762c",
    "gpu.score": "#2f9e8f",
    "gpu.logprobs": "#c2559d",
    "gpu.generate": "#d97706",
    "api.call": "#9b6ef3",
}
OTHER_COLOURS: Final = ("#c65f5f", "#4f8f4f", "#b8901f", "#6f86a8")
FAULT_COLOURS: Final = {INFRASTRUCTURE: "#e0484d", "program": "#5b7cfa", "caller": "#d97706", "": "#8b95a5"}
LEAST_S: Final = 0.001
MOST_BARS: Final = 15
ROW_PX: Final = 26


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A picture with its title, one sentence on how to read it, its height in pixels, and its figures as a table."""

    key: str
    title: str
    reading: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    table: Table
    height: int = 320
    left_out: str = ""


def colour_of(kind: str, kinds: Sequence[str]) -> str:
    """Return the colour of a kind; those of Celery tasks of one's own take turns."""
    others = [other for other in kinds if other not in KIND_COLOURS]
    return KIND_COLOURS.get(kind) or OTHER_COLOURS[others.index(kind) % len(OTHER_COLOURS)]


def axis(title: str, **more: Any) -> dict[str, Any]:
    """Return an axis with a title."""
    return {"title": {"text": title}, "automargin": True, **more}


def since_submission(time_axis: Clock) -> dict[str, Any]:
    """Return the axis of a time from the first submission on."""
    words = {"s": "seconds", "min": "minutes", "h": "hours", "d": "days"}
    return axis(f"{words[time_axis.unit]} since the first submission", rangemode="tozero")


def rows_axis(names: Sequence[str], most: int = 34) -> dict[str, Any]:
    """Return an axis with a row for each name, from above."""
    labels = [in_picture(name, most) for name in names]
    return axis("", tickvals=list(range(len(names))), ticktext=labels, range=[len(names) - 0.5, -0.5], showgrid=False, zeroline=False)


def act_picture(subject: Subject) -> Picture:
    """Return how ACT and its parts are distributed."""
    actions = subject.carried_out
    lines = [(name, [getattr(action, part) or 0.0 for action in actions], {"color": colour}) for name, part, colour in PARTS]
    return _distribution(f"{subject.key}-act", "How long actions took", lines)


def act_comparison(subject: Subject, against: Subject) -> Picture:
    """Return the distribution of ACT of two subjects."""
    styles = ({"color": ACT}, {"color": QUEUE, "dash": "dash"})
    both = zip((subject, against), labels(subject, against), styles, strict=True)
    lines = [(name, [action.act_s or 0.0 for action in each.carried_out], style) for each, name, style in both]
    return _distribution("compared-act", "How long actions took", lines)


def _distribution(key: str, title: str, lines: Sequence[tuple[str, list[float], Mapping[str, Any]]]) -> Picture:
    data: list[dict[str, Any]] = []
    columns, points = [], (10, 25, 50, 75, 90, 95, 99, 100)
    for name, values, line in lines:
        if not values:
            continue
        cents, at = percentiles(values)
        columns.append((name, np.percentile(values, points)))
        data.append(
            {
                "type": "scatter", "mode": "lines", "name": in_picture(name), "line": {"width": 2, **line},
                "x": rounded(np.maximum(at, LEAST_S)), "y": rounded(cents, 2), "hovertemplate": "%{y:.1f} % within %{x:.3f} s",
            }
        )  # fmt: skip
    rows = [(f"{cent} %", [float(values[index]) for _, values in columns]) for index, cent in enumerate(points)]
    return Picture(
        key=key,
        title=title,
        reading="Follow a height to the right: at 95 % a line stands at the seconds within which 95 of 100 actions were done, "
        "so the further left a line, the faster. What took less than 1 ms stands at 1 ms.",
        data=data,
        layout={"xaxis": axis("seconds, logarithmic", type="log", dtick=1), "yaxis": axis("part of actions, %", range=[0, 101])},
        table=series_table("Seconds within which so many actions were done", "part of actions", [c[0] for c in columns], rows, digits=3),
    )


def parts_picture(subject: Subject, key: str, title: str, groups: Mapping[str, ActStats]) -> Picture:
    """Return the mean ACT of groups of actions, split into its parts."""
    shown = {name: stats for name, stats in groups.items() if stats.act.count}
    names = sorted(shown, key=lambda name: -shown[name].act.mean)[:MOST_BARS]
    parts = [(name, f"mean_{field}", colour) for name, field, colour in PARTS[1:]]
    data = [
        {
            "type": "bar", "orientation": "h", "name": part, "marker": {"color": colour}, "y": list(range(len(names))),
            "x": [round(getattr(shown[name], field), 4) for name in names], "hovertemplate": f"{part} %{{x:.3f}} s<extra></extra>",
        }
        for part, field, colour in parts
    ]  # fmt: skip
    rows = [(name, [getattr(shown[name], field) for _, field, _ in parts]) for name in names]
    return Picture(
        key=f"{subject.key}-{key}",
        title=title,
        reading="The length of a bar is the mean ACT; the longest part says where the time goes: waiting, handing over, or running.",
        data=data,
        layout={"barmode": "stack", "xaxis": axis("mean seconds"), "yaxis": rows_axis(names)},
        table=series_table("Mean seconds", "group", [part for part, _, _ in parts], rows, digits=3),
        height=110 + ROW_PX * max(2, len(names)),
        left_out=f"{len(shown) - len(names)} groups with shorter ACT" if len(shown) > len(names) else "",
    )


def queue_picture(subject: Subject) -> Picture:
    """Return how many actions of each kind waited, over time."""
    found: dict[str, list[Span]] = {}
    for action, span in waits(subject):
        found.setdefault(action.kind, []).append(span)
    kinds = sorted(found)
    lines = [(kind, found[kind], {"stackgroup": "one", "line": {"width": 0.5, "color": colour_of(kind, kinds)}}) for kind in kinds]
    if background := list(background_waits(subject)):
        lines.append(("in the background", background, {"stackgroup": "one", "line": {"width": 0.5, "color": QUEUE}}))
    return _over_time(
        f"{subject.key}-queue",
        "Waiting actions over time",
        "The height is how many actions waited, one colour for each kind; a hill that does not come down is a queue that grows faster than "
        "it is served. What commands waited in the background, without a core, is known as a sum and drawn spread over their runs.",
        "waiting actions",
        clock(subject.began, subject.ended),
        lines,
    )


def cores_picture(subject: Subject, resource: str) -> Picture:
    """Return how many cores or cells were granted, and used, over time."""
    granted = [span for _, span in holdings(subject, resource)]
    held_by_pods = list(pods(subject)) if resource == CORES else []
    lines: list[tuple[str, list[Span], dict[str, Any]]] = []
    if held_by_pods:
        lines.append(("held by pods", held_by_pods, {"line": {"width": 2, "color": QUEUE}}))
    lines.append(("granted to actions", granted, {"fill": "tozeroy", "line": {"width": 1.5, "color": ACT}}))
    if resource == CORES:
        lines.append(("used by commands", list(used_cores(subject)), {"fill": "tozeroy", "line": {"width": 1.5, "color": EXECUTION}}))
    most = capacity(subject, resource)
    picture = _over_time(
        f"{subject.key}-{resource}",
        f"{resource.capitalize()} over time",
        f"The dashed line is what the nodes have ({most} {resource}); "
        + (
            "what lies between granted and used is held by programs that wait or that others slow down. CPU time, and what a command held "
            "before its cores were last changed, are known as sums and drawn spread evenly, so that a line may rise too high for a moment."
            if resource == CORES
            else "actions that share an instance of a service share its cells, so that the line may rise above what is there."
        ),
        resource,
        clock(subject.began, subject.ended),
        lines,
    )
    end = round(clock(subject.began, subject.ended).span_s / clock(subject.began, subject.ended).unit_s, 4)
    there = {
        "type": "scatter", "mode": "lines", "name": "there", "x": [0, end], "y": [most, most],
        "line": {"width": 1.5, "dash": "dash", "color": OVERHEAD}, "hovertemplate": "%{y}",
    }  # fmt: skip
    picture.data.append(there)
    return picture


def over_time_comparison(subject: Subject, against: Subject) -> list[Picture]:
    """Return waiting actions and granted cores of two subjects, each from its own beginning."""
    span_s = max(subject.ended - subject.began, against.ended - against.began)
    axis_of_time = clock(0.0, span_s)
    styles = ({"line": {"width": 2, "color": ACT}}, {"line": {"width": 2, "color": QUEUE, "dash": "dash"}})
    both = list(zip((subject, against), labels(subject, against), styles, strict=True))
    begins_alike = "Both begin at 0, whenever they ran: "
    waiting = [
        (name, _from_its_beginning(each, [*(span for _, span in waits(each)), *background_waits(each)]), style)
        for each, name, style in both
    ]
    reserved = [(name, _from_its_beginning(each, _reserved(each)), style) for each, name, style in both]
    return [
        _over_time(
            "compared-queue", "Waiting actions over time", begins_alike + "the lower and the sooner at nothing, the better.",
            "waiting actions", axis_of_time, waiting,
        ),
        _over_time(
            "compared-cores", "Reserved cores over time",
            begins_alike + "the area under a line is core-seconds that nobody else had.", "reserved cores", axis_of_time, reserved,
        ),
    ]  # fmt: skip


def _reserved(subject: Subject) -> Iterable[Span]:
    """Return what nobody else could have: pods where environments hold cores for themselves, else grants."""
    return list(pods(subject)) or [span for _, span in holdings(subject, CORES)]


def _from_its_beginning(subject: Subject, spans: Iterable[Span]) -> list[Span]:
    return [Span(start - subject.began, end - subject.began, amount) for start, end, amount in spans]


def _over_time(
    key: str, title: str, reading: str, unit: str, time_axis: Clock, lines: Sequence[tuple[str, list[Span], Mapping[str, Any]]]
) -> Picture:
    edges = stretches(time_axis)
    at = rounded(time_axis.at(middles(edges)))
    data, sampled = [], []
    coarse = stretches(time_axis, 12)
    for name, spans, style in lines:
        sampled.append(held(spans, coarse))
        line = {"type": "scatter", "mode": "lines", "name": in_picture(name), "x": at, "y": rounded(held(spans, edges), 3)}
        data.append({**line, "hovertemplate": "%{y:.1f}", **style})
    heads = time_axis.at(coarse)
    rows = [(f"{heads[i]:.4g} to {heads[i + 1]:.4g} {time_axis.unit}", [float(values[i]) for values in sampled]) for i in range(12)]
    return Picture(
        key=key,
        title=title,
        reading=reading,
        data=data,
        layout={
            "xaxis": since_submission(time_axis),
            "yaxis": axis(unit, rangemode="tozero"),
            "hovermode": "x unified",
        },
        table=series_table(f"{unit.capitalize()} on average", "time", [name for name, _, _ in lines], rows),
    )


def ends_picture(subject: Subject, table: Table) -> Picture:
    """Return how often actions ended by each cause."""
    found = ends(subject)[:MOST_BARS]
    names = [f"{cause or 'cause not known'} ({status})" for (_, cause, status), _, _ in found]
    data = [
        {
            "type": "bar", "orientation": "h", "name": FAULTS.get(fault, fault), "marker": {"color": FAULT_COLOURS.get(fault, OVERHEAD)},
            "y": [row for row, end in enumerate(found) if end[0][0] == fault], "x": [end[1] for end in found if end[0][0] == fault],
            "hovertemplate": "%{x} actions<extra></extra>",
        }
        for fault in dict.fromkeys(end[0][0] for end in found)
    ]  # fmt: skip
    return Picture(
        key=f"{subject.key}-ends",
        title="Ends by fault and cause",
        reading="A bar is a cause, its colour whose fault it was; those of the infrastructure are ours, and none may become a reward of 0. "
        "A command that exits with a code other than 0 has succeeded, by the cause exit.",
        data=data,
        layout={"barmode": "overlay", "xaxis": axis("actions", rangemode="tozero"), "yaxis": rows_axis(names)},
        table=table,
        height=110 + ROW_PX * max(2, len(names)),
    )


def describe(action: Action, began: float) -> str:
    """Return what a picture shows of an action where one points at it."""
    lines = [
        f"{in_picture(action.kind)} {in_picture(action.action_class, 40)}",
        f"job {in_picture(action.job, 40)}, trajectory {in_picture(action.trajectory, 40)}",
        f"submitted at {action.submitted_at - began:.2f} s, {action.status}",
    ]
    if action.act_s is not None:
        lines.append(
            f"ACT {seconds(action.act_s)} s, of it {seconds(action.queue_s)} s queueing, {seconds(action.background_s)} s background, "
            f"{seconds(action.execution_s)} s execution"
        )
    return "<br>".join(lines)


def pictures_over_time(subject: Subject) -> list[Picture]:
    """Return queue, cores and, where there are any, cells."""
    found = [queue_picture(subject), cores_picture(subject, CORES)]
    return [*found, cores_picture(subject, CELLS)] if capacity(subject, CELLS) else found
