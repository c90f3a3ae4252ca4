"""The timeline: each core and each cell of the nodes as a row, with the actions that held it.

Where there are few enough spans, each is a bar that says what it is. Beyond `MOST_SPANS` a page would be slow, and each row is drawn as the
part of its time in which it was held; beyond `MOST_ROWS` rows, each node is one. Either way all spans count.

The journal keeps the cores that an action held last. The time before they were changed has rows of its own. So has the time in the
background, where an action holds no core.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from app.journal.models import Action
from app.report.pictures import KIND_COLOURS, OVERHEAD, Picture, colour_of, describe, rows_axis, since_submission
from app.report.series import clock, held, middles, rounded, stretches
from app.report.subject import Span, Subject
from app.report.tables import Table
from app.report.text import count, plain
from tangram.action import CELLS, CORES

MOST_SPANS: Final = 4000
MOST_ROWS: Final = 160
MOST_LANES: Final = 8
BACKGROUND, MOVED = "background", "changed"
_ORDER: Final = {CORES: 0, MOVED: 1, BACKGROUND: 2, CELLS: 3}

Row = tuple[str, int, int]
"""A row: its node, the place of its kind in the order of rows, and the id of the core or cell, or the number of a lane."""


@dataclass(frozen=True, slots=True)
class _Held:
    row: Row
    span: Span
    action: Action


def timeline(subject: Subject) -> Picture:
    """Return who held which core and which cell, over time."""
    spans, loose = _spans(subject)
    rows = sorted({one.row for one in spans} | _all_rows(subject))
    singly = len(spans) + len(loose) <= MOST_SPANS
    if singly:
        in_lanes = _in_lanes(loose)
        spans, rows = [*spans, *in_lanes], sorted({*rows, *(one.row for one in in_lanes)})
    elif len(rows) > MOST_ROWS:
        spans = [_Held((one.row[0], one.row[1], -1), one.span, one.action) for one in spans]
        rows = sorted({(node, kind, -1) for node, kind, _ in rows})
    names = [_name(row) for row in rows]
    heights = {row: number for number, row in enumerate(rows)}
    data = _bars(subject, spans, heights) if singly else _fields(subject, spans, rows)
    time_axis = clock(subject.began, subject.ended)
    return Picture(
        key=f"{subject.key}-timeline",
        title="Who held which core and cell",
        reading=_reading(singly, {row[1] for row in rows}, bool(subject.history.pods)),
        data=data,
        layout={
            "barmode": "overlay",
            "xaxis": since_submission(time_axis),
            "yaxis": rows_axis(names, 28),
        },
        table=_table(subject, spans, rows),
        height=120 + (24 if len(rows) <= 40 else 14 if len(rows) <= 100 else 7) * max(3, len(rows)),
        left_out="" if singly else _not_drawn(loose, len(spans)),
    )


def _spans(subject: Subject) -> tuple[list[_Held], list[_Held]]:
    """Return what was held on cores and cells that are known, and what has no core that is known."""
    actions = {action.id: action for action in subject.history.actions}
    known: list[_Held] = []
    loose: list[_Held] = []
    for grant in subject.history.grants:
        if not grant.resource:
            continue
        end = subject.ended if grant.released_at is None else grant.released_at
        since = grant.granted_at if grant.resized_at is None else grant.resized_at
        action = actions[grant.action]
        if grant.background:
            loose.append(_Held((grant.node, _ORDER[BACKGROUND], 0), Span(since, end, 1.0), action))
        if since > grant.granted_at:
            loose.append(_Held((grant.node, _ORDER[MOVED], 0), Span(grant.granted_at, since, 1.0), action))
        ids = grant.core_ids if grant.resource == CORES else grant.cell_ids
        known += [_Held((grant.node, _ORDER[grant.resource], id), Span(since, end, 1.0), action) for id in ids]
    return known, loose


def _all_rows(subject: Subject) -> set[Row]:
    """Return the rows of all cores and cells that there are, held or not; workers may name their cores as they like."""
    rows = set[Row]()
    for name, node in subject.history.nodes.items():
        ids = {id for grant in subject.history.grants if grant.node == name for id in grant.core_ids}
        if all(id < node.cores for id in ids):
            rows |= {(name, _ORDER[CORES], id) for id in range(node.cores)}
        rows |= {(name, _ORDER[CELLS], id) for id in range(node.cells)}
    return rows


def _in_lanes(loose: Sequence[_Held]) -> list[_Held]:
    """Lay spans that overlap on lanes, as few as will do; where more than `MOST_LANES` are needed, the last one has the rest."""
    free_at: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    laid = []
    for one in sorted(loose, key=lambda one: one.span.start):
        lanes = free_at[one.row[:2]]
        lane = next((number for number, free in enumerate(lanes) if free <= one.span.start), len(lanes))
        if lane < MOST_LANES:
            lanes[lane : lane + 1] = [one.span.end]
        laid.append(_Held((*one.row[:2], min(lane, MOST_LANES - 1)), one.span, one.action))
    return laid


def _name(row: Row) -> str:
    node, kind, id = row
    word = next(word for word, number in _ORDER.items() if number == kind)
    if id < 0:
        return f"{node} {word}"
    if word in (CORES, CELLS):
        return f"{node} {word.removesuffix('s')} {id}"
    return f"{node} {word}" + (f" {id + 1}" if id else "")


def _bars(subject: Subject, spans: Sequence[_Held], heights: dict[Row, int]) -> list[dict[str, Any]]:
    time_axis = clock(subject.began, subject.ended)
    data = [_pods(subject, heights)] if subject.history.pods else []
    by_kind: defaultdict[str, list[_Held]] = defaultdict(list)
    for one in spans:
        if not (subject.history.pods and one.action.kind == "cpu.open"):
            by_kind[one.action.kind].append(one)
    kinds = sorted(by_kind, key=lambda kind: (kind not in KIND_COLOURS, kind))
    for kind in kinds:
        held_by = by_kind[kind]
        starts, ends = (time_axis.at(np.array([getattr(one.span, side) for one in held_by])) for side in ("start", "end"))
        colour = colour_of(kind, kinds)
        data.append(
            {
                "type": "bar", "orientation": "h", "name": kind, "base": rounded(starts), "x": rounded(ends - starts),
                "y": [heights[one.row] for one in held_by], "hovertext": [describe(one.action, subject.began) for one in held_by],
                "hoverinfo": "text", "textposition": "none", "width": 0.72, "opacity": 0.85,
                # What is shorter than a pixel is seen by its outline.
                "marker": {"color": colour, "line": {"width": 1, "color": colour}},
            }
        )  # fmt: skip
    return data


def _pods(subject: Subject, heights: dict[Row, int]) -> dict[str, Any]:
    time_axis = clock(subject.began, subject.ended)
    at: list[tuple[int, float, float]] = []
    for pod in subject.history.pods:
        end = subject.ended if pod.ended_at is None else pod.ended_at
        rows = [heights.get((pod.node or "", _ORDER[CORES], id)) for id in pod.core_ids]
        at += [(row, pod.opened_at, end) for row in rows if row is not None]
    starts, ends = (time_axis.at(np.array([one[side] for one in at])) for side in (1, 2))
    return {
        "type": "bar", "orientation": "h", "name": "pod", "base": rounded(starts), "x": rounded(ends - starts), "y": [one[0] for one in at],
        "hovertemplate": "held by a pod<extra></extra>", "width": 0.95, "opacity": 0.3,
        "marker": {"color": OVERHEAD, "line": {"width": 1, "color": OVERHEAD}},
    }  # fmt: skip


def _fields(subject: Subject, spans: Sequence[_Held], rows: Sequence[Row]) -> list[dict[str, Any]]:
    time_axis = clock(subject.began, subject.ended)
    edges = stretches(time_axis)
    by_row: defaultdict[Row, list[Span]] = defaultdict(list)
    for one in spans:
        by_row[one.row].append(one.span)
    sizes = Counter((node, kind) for node, kind, _ in _all_rows(subject))
    parts = [held(by_row[row], edges) / (max(1, sizes[row[:2]]) if row[2] < 0 else 1) for row in rows]
    return [
        {
            "type": "heatmap", "x": rounded(time_axis.at(middles(edges))), "y": list(range(len(rows))),
            "z": [rounded(np.minimum(part, 1.0) * 100, 1) for part in parts], "zmin": 0, "zmax": 100, "ygap": 1,
            "colorscale": [[0, "rgba(91,124,250,0.06)"], [1, "rgba(91,124,250,1)"]],
            "colorbar": {"title": {"text": "held, %"}, "thickness": 12}, "hovertemplate": "%{z:.0f} % held<extra></extra>",
        }
    ]  # fmt: skip


def _table(subject: Subject, spans: Sequence[_Held], rows: Sequence[Row]) -> Table:
    seconds: defaultdict[Row, float] = defaultdict(float)
    actions: defaultdict[Row, set[str]] = defaultdict(set)
    for one in spans:
        seconds[one.row] += one.span.end - one.span.start
        actions[one.row].add(one.action.id)
    span_s = max(subject.ended - subject.began, 1e-9)
    shown = rows[: MOST_ROWS // 2]
    written = [(plain(_name(row)), count(len(actions[row])), f"{seconds[row]:,.1f}", f"{seconds[row] / span_s:.1%}") for row in shown]
    left_out = f"{len(rows) - len(shown)} more rows" if len(rows) > len(shown) else ""
    columns = ("core, cell or lane", "actions", "held s", "of the whole time")
    return Table(caption="How long each was held", columns=columns, rows=written, left_out=left_out)


def _reading(singly: bool, kinds: set[int], with_pods: bool) -> str:
    if not singly:
        return "A row is a core or a cell, or all of a node where there are many; the fuller its colour, the more of that time it was held."
    text = "A row is a core or a cell, and a bar an action that held it; gaps are idle time. Point at a bar to see which action it is."
    if with_pods:
        text += " A pale bar behind is a pod, which holds its cores for an environment whether an action runs or not."
    if _ORDER[MOVED] in kinds:
        text += (
            " Rows `changed`: the journal keeps the cores that an action held last, and the time before they were changed is drawn there."
        )
    if _ORDER[BACKGROUND] in kinds:
        text += " In the background an action has no core of its own."
    return text


def _not_drawn(loose: Sequence[_Held], spans: int) -> str:
    text = f"{count(spans)} spans are too many to be drawn one by one"
    if not loose:
        return text
    total = sum(one.span.end - one.span.start for one in loose)
    return f"{text}; {count(total)} s that actions ran in the background or on cores that were changed later are not in the picture"
