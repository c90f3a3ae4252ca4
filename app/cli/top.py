"""`tangram top`: the first page of `tangram web` in a terminal, readable at 80 columns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from app.cli.consoles import Figures, make_console
from app.web.attention import notices
from app.web.formats import node_state, number, percent, quota_state, seconds

_MOST_ROWS = 8
_BAR = 30
_WIDTH_OF_BARS = 60
"""Columns from which on there is room for bars beside their figures."""


@dataclass(frozen=True, slots=True)
class Room:
    """How much of each table is shown, and whether there are empty lines between tables and bars beside figures."""

    rows: int = _MOST_ROWS
    spaced: bool = True
    bars: bool = True


def keep_showing(read: Callable[[], tuple[Mapping[str, Any], str]], interval_s: float, stop: threading.Event) -> None:
    """Show the overview and the problem with it again and again until `stop` is set; once where nobody sees it change, as in a file."""
    console = make_console()
    bars = console.width >= _WIDTH_OF_BARS
    if not console.is_terminal:
        console.print(page(*read(), Room(bars=bars)))
        return
    with Live(fitting(console, *read()), console=console, refresh_per_second=4) as live:
        while not stop.wait(interval_s):
            live.update(fitting(console, *read()))


def fitting(console: Console, document: Mapping[str, Any], problem: str = "") -> RenderableType:
    """Return `page` with as many rows of each table as the terminal is high for, one at least."""
    bars = console.width >= _WIDTH_OF_BARS
    for room in (Room(bars=bars), *(Room(rows, False, bars) for rows in range(_MOST_ROWS, 0, -1))):
        shown = page(document, problem, room)
        if len(console.render_lines(shown, pad=False)) <= console.height:
            break
    return shown


def page(document: Mapping[str, Any], problem: str = "", room: Room = Room()) -> RenderableType:
    """Return what is shown of an overview; `problem` says why the scheduler's own figures could not be read, where that is so."""
    parts: list[RenderableType] = [_head(document, problem), _amounts(document, bars=room.bars)]
    found = notices(dict(document), problem)
    for notice in found[: room.rows]:
        style = "red" if notice.level == "bad" else "yellow"
        parts.append(Text(f"! {notice.text}", style=style, no_wrap=not room.spaced, overflow="fold" if room.spaced else "ellipsis"))
    if len(found) > room.rows:
        parts.append(Text(f"  and {len(found) - room.rows} more; `tangram web` shows all"))
    parts += [_queue(document, room), _jobs(document, room), _nodes(document, room)]
    if document["quotas"]:
        parts.append(_quotas(document, room))
    if document["services"]:
        parts.append(_services(document, room))
    return Group(*parts)


def _head(document: Mapping[str, Any], problem: str) -> Text:
    scheduler = document["scheduler"]
    if scheduler is None:
        return Text("the scheduler's figures are not known" if problem else "no scheduler shows itself", style="bold red")
    return Text(
        f"policy {scheduler['policy']}, epoch {scheduler['epoch']}; {number(document['waiting'])} waiting, the oldest for "
        f"{seconds(document['oldest_wait_s'])}; {number(document['running'])} running",
        style="bold",
    )


def _amounts(document: Mapping[str, Any], *, bars: bool) -> Table:
    table = Table.grid(padding=(0, 1))
    for name in ("cores", "cells"):
        amounts = document[name]
        part = amounts["granted"] / amounts["total"] if amounts["total"] else 0.0
        bar = Text("█" * round(part * _BAR), style="blue") + Text("░" * (_BAR - round(part * _BAR)), style="dim")
        used = "" if amounts["used"] is None else f", {number(amounts['used'])} used"
        figures = f"{number(amounts['granted'])} of {number(amounts['total'])} granted{used}"
        table.add_row(name, *((bar, figures) if bars else (figures,)))
    return table


def _table(title: str, columns: tuple[str, ...], rows: Iterable[tuple[object, ...]], total: int, room: Room) -> Figures:
    counted = f"{title}, {room.rows} of {total}" if total > room.rows else title
    table = Figures(
        title=("\n" if room.spaced else "") + counted, title_justify="left", title_style="bold", box=None, pad_edge=False, expand=False
    )
    table.add_column(columns[0], max_width=28, no_wrap=True, overflow="ellipsis")
    for column in columns[1:]:
        table.add_column(column, justify="right", no_wrap=True)
    # Names come from users: as Text they are shown as they are, without markup.
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    return table


def _queue(document: Mapping[str, Any], room: Room) -> RenderableType:
    groups = document["queue"]
    if not groups:
        return Text("\nnothing waits" if room.spaced else "nothing waits")
    rows = ((one["job"], one["kind"], number(one["waiting"]), seconds(one["oldest_s"])) for one in groups[: room.rows])
    return _table("what waits", ("job", "kind", "waiting", "oldest"), rows, len(groups), room)


def _jobs(document: Mapping[str, Any], room: Room) -> Figures:
    jobs = document["jobs"]
    rows = (
        (
            one["name"],
            one["ours"],
            number(one["ended"]),
            one["running"],
            percent(one["share"]),
            seconds(one["mean_act"] if one["ended"] else None),
        )
        for one in jobs[: room.rows]
    )
    return _table("jobs, last hour", ("job", "our failures", "ended", "running", "share", "ACT"), rows, len(jobs), room)


def _nodes(document: Mapping[str, Any], room: Room) -> Figures:
    nodes = document["nodes"]
    rows = (
        (
            one["name"],
            node_state(one),
            one["ours"],
            f"{one['cores_granted']}/{one['cores']}" if one["cores"] else "–",
            f"{one['cells_granted']}/{one['cells']}" if one["cells"] else "–",
            one["running"],
            one["environments"],
        )
        for one in nodes[: room.rows]
    )
    return _table("nodes", ("node", "state", "our failures", "cores", "cells", "running", "envs"), rows, len(nodes), room)


def _quotas(document: Mapping[str, Any], room: Room) -> Figures:
    quotas = document["quotas"]
    rows = (
        (one["name"], number(one["running"]), number(one["concurrency"]), number(one["waiting"]), quota_state(one))
        for one in quotas[: room.rows]
    )
    return _table("quotas", ("quota", "in use", "places", "waiting", "state"), rows, len(quotas), room)


def _services(document: Mapping[str, Any], room: Room) -> Figures:
    services = document["services"]
    rows = (
        (one["name"], ", ".join(f"{count} {state}" for state, count in one["states"].items()) or "absent", one["running"], one["waiting"])
        for one in services[: room.rows]
    )
    return _table("services", ("service", "instances", "running", "waiting"), rows, len(services), room)
