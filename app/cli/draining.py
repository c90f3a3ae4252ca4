"""What `tangram drain` does: it takes a node out of service, or puts it back, and shows what is left there.

The scheduler is asked over its control queue, as for a cancel. What came of that, and what is left on the node, is read in the journal.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import asdict
from typing import Final

from sqlalchemy import Engine

from app.cli.common import stop_on_signals
from app.cli.consoles import Figures, make_console
from app.cli.output import note, print_json
from app.cli.state import open_journal
from app.journal.status import NodeLeft, known_nodes, node_left
from app.web.formats import left_words, seconds
from tangram.errors import TangramError
from tangram.session import Session
from tangram.settings import Settings

NAME: Final = "tangram drain"
"""The job in whose name the command connects; it submits nothing."""

LOOK_EVERY_S: Final = 0.25


def drain_node(settings: Settings, node: str, wait_s: float | None, *, draining: bool, as_json: bool) -> bool:
    """Have a node drained or put back, and show what is left there, after at most `wait_s` seconds; return whether nothing is.

    Raises `StackUnreachable` when there is no stack; `TangramError` when the journal knows no such node, or no scheduler takes the request
    up.
    """
    stop, engine = stop_on_signals(), open_journal(settings)
    try:
        if node_left(engine, node, time.time()) is None:
            raise TangramError(f"the journal knows no node {node!r}; it knows {', '.join(known_nodes(engine)) or 'none yet'}")
        _ask(settings, node, draining=draining)
        left = _taken_up(engine, settings, node, stop, draining=draining)
        if wait_s is not None and not left.empty:
            note(f"{_line(left)}; waiting for up to {wait_s:g} s")
            left = _look_until(engine, node, stop, wait_s, lambda found: found.empty)
    finally:
        engine.dispose()
    if as_json:
        print_json(asdict(left))
    else:
        _show(left)
    return left.empty


def _ask(settings: Settings, node: str, *, draining: bool) -> None:
    """Send the request. Raises `StackUnreachable`."""
    session = Session(NAME, settings)
    try:
        wait(session.start(), session.start_limit_s)
        session.check_started()
        session.wait_for(session.drain(node, draining=draining))
    finally:
        session.stop()


def _taken_up(engine: Engine, settings: Settings, node: str, stop: threading.Event, *, draining: bool) -> NodeLeft:
    """Return what is left on the node once the scheduler has taken the request up."""
    limit_s = settings.takeover_s + settings.connect_timeout_s
    found = _look_until(engine, node, stop, limit_s, lambda left: left.draining == draining)
    if found.draining != draining:
        raise TangramError(f"no scheduler has taken the request up in {limit_s:g} s; the next one that is active will (`tangram status`)")
    return found


def _look_until(engine: Engine, node: str, stop: threading.Event, limit_s: float, enough: Callable[[NodeLeft], bool]) -> NodeLeft:
    """Read what is left again and again, until that is `enough` or the time is over."""
    ends_at = time.monotonic() + limit_s
    while True:
        found = node_left(engine, node, time.time())
        if found is None:
            raise TangramError(f"the journal does not know node {node!r} any more")
        rest_s = ends_at - time.monotonic()
        if enough(found) or rest_s <= 0:
            return found
        if stop.wait(min(LOOK_EVERY_S, rest_s)):
            raise KeyboardInterrupt


def _line(left: NodeLeft) -> str:
    if not left.draining:
        return f"node {left.node} takes actions again"
    return f"node {left.node} is {left_words(len(left.running), len(left.environments))}"


def _show(left: NodeLeft) -> None:
    console = make_console()
    console.print(_line(left), soft_wrap=True)
    if not left.draining:
        return
    if left.running:
        rows = [(one.id, one.job, one.kind, one.environment or "–", seconds(one.age_s)) for one in left.running]
        console.print(_table("running actions", ("action", "job", "kind", "environment", "for"), rows))
    if left.environments:
        rows = [(one.id, one.job, one.owner or "–", one.state, seconds(one.age_s)) for one in left.environments]
        console.print(_table("environments", ("environment", "job", "owner", "state", "for"), rows))


def _table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Figures:
    table = Figures(title=f"\n{title}", title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
