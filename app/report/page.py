"""The page of a report: one HTML file with its style, its script, plotly.js and its figures in it.

The browser is told to load nothing (`Content-Security-Policy`), and to run only the two scripts that stand here. Figures stand in elements
that are data, where nothing is run.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from plotly.offline import get_plotlyjs

from app.report import pictures
from app.report.comparison import compare, comparison_table, kinds_table, replay_table, verdict
from app.report.pictures import Picture
from app.report.subject import Subject, labels
from app.report.tables import MOST_SLOWEST, Table, act_table, class_table, ends_table, memory_table, slowest_table, unfinished_table
from app.report.text import count, plain, seconds, share
from app.report.timeline import timeline

FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the page: tiles with the main figures, remarks, then tables and pictures in this order."""

    key: str
    title: str
    tiles: list[tuple[str, str]]
    remarks: list[str]
    blocks: list[Picture | Table]


def render(subject: Subject, against: Subject | None = None) -> str:
    """Return the page of a subject, compared with another one where there is one."""
    subjects = [subject] if against is None else [subject, against]
    sections = [*([_comparison(subject, against)] if against is not None else []), *(_section(each) for each in subjects)]
    scripts = [_plotly_js(), (FOLDER / "page.js").read_text(encoding="utf-8")]
    environment = Environment(
        loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.tests["picture"] = lambda block: isinstance(block, Picture)
    template = environment.get_template("page.html.jinja")
    return template.render(
        title=plain(subject.title if against is None else " against ".join(labels(subject, against))),
        verdict=verdict(subject, against),
        made_at=_local_time(subject.now),
        sections=sections,
        figures={block.key: _data(block) for section in sections for block in section.blocks if isinstance(block, Picture)},
        style=(FOLDER / "page.css").read_text(encoding="utf-8"),
        scripts=scripts,
        hashes=" ".join(f"'sha256-{_hash(script)}'" for script in scripts),
    )


@lru_cache(maxsize=1)
def _plotly_js() -> str:
    return str(get_plotlyjs())


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")


def _data(picture: Picture) -> str:
    """Return a picture as JSON that may stand in HTML: no `<` of it ends the element that it is in."""
    document: dict[str, Any] = {"data": picture.data, "layout": {**picture.layout, "height": picture.height}}
    return json.dumps(document, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _comparison(subject: Subject, against: Subject) -> Section:
    document = compare(subject, against)
    names = labels(subject, against)
    replays = replay_table(subject, against)
    tables = [*([replays] if replays is not None else []), comparison_table(document, names), kinds_table(document, names)]
    overlaid = [pictures.act_comparison(subject, against), *pictures.over_time_comparison(subject, against)]
    return Section(key="comparison", title="Compared", tiles=[], remarks=[], blocks=[*tables, *overlaid])


def _section(subject: Subject) -> Section:
    figures = subject.figures
    tables: list[Picture | Table] = [act_table("By kind", "kind", figures.by_kind), act_table("By job", "job", figures.by_job)]
    blocks: list[Picture | Table] = []
    if subject.history.actions:
        blocks = [
            pictures.act_picture(subject),
            pictures.parts_picture(subject, "kinds", "Where the time goes, by kind", figures.by_kind),
            *([pictures.parts_picture(subject, "jobs", "Where the time goes, by job", figures.by_job)] if len(figures.by_job) > 1 else []),
            *pictures.pictures_over_time(subject),
            timeline(subject),
        ]
    if subject.not_all_well:
        blocks.append(pictures.ends_picture(subject, ends_table(subject)))
    if subject.history.actions:
        tables += [slowest_table(subject), class_table(subject)]
    if subject.history.limits:
        tables.append(memory_table(subject))
    if subject.unfinished:
        tables.append(unfinished_table(subject))
    return Section(key=subject.key, title=plain(subject.title), tiles=_tiles(subject), remarks=_remarks(subject), blocks=[*blocks, *tables])


def _tiles(subject: Subject) -> list[tuple[str, str]]:
    total = subject.figures.total
    every = sum(total.by_status.values())
    reserved = subject.figures.pod_or_grant_core_s
    return [
        ("mean ACT", f"{seconds(total.act.mean)} s"),
        ("p95 ACT", f"{seconds(total.act.p95)} s"),
        ("mean queueing", f"{seconds(total.mean_queue_s)} s"),
        ("first submission to last end", f"{seconds(subject.ended - subject.began)} s"),
        ("actions", count(every)),
        ("not succeeded", count(total.not_succeeded)),
        ("by our fault", count(subject.failed_by_us)),
        (
            "core-seconds used of reserved",
            f"{count(total.core_s_used)} of {count(reserved)} ({share(total.core_s_used, reserved) or 'none'})",
        ),
    ]


def _remarks(subject: Subject) -> list[str]:
    remarks = [f"First submission {_local_time(subject.began)}. ACT is submission to result: queueing, background, overhead and execution."]
    if not subject.history.actions:
        remarks = ["There is no action of it in the journal."]
    if subject.run is not None and subject.run.ended_at is None:
        remarks.append(f"This run has not ended, or was broken off: all figures are as of {_local_time(subject.now)}.")
    if subject.unfinished:
        remarks.append(f"{count(len(subject.unfinished))} actions have not ended; they count in queue and cores, and not in ACT.")
    if subject.rolled_up:
        remarks.append(
            f"{count(subject.rolled_up)} older actions are in the journal as figures of an hour only: they are in the tables by kind and "
            "by job, and in no picture."
        )
    if len(subject.carried_out) > MOST_SLOWEST:
        remarks.append(f"Single actions are listed for the {MOST_SLOWEST} slowest only; all others count in every figure.")
    return remarks


def _local_time(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(at))
