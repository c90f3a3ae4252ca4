"""How the page and `tangram top` write numbers, times and addresses."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import quote

_FOLDERS: Final = {"action": "actions", "environment": "environments", "job": "jobs", "node": "nodes", "service": "services"}

SILENT_S: Final = 5.0
"""Seconds without a sign of life after which a scheduler is named."""

BAD: Final = ("failed", "timed_out", "lost", "rejected")


def seconds(value: float | None) -> str:
    """Return a duration as a person reads it."""
    if value is None:
        return "–"
    if value < 0.0995:
        return f"{value * 1000:.0f} ms"
    if value < 59.95:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def clock(at: float | None) -> str:
    """Return a time of day in UTC, to the second."""
    return "–" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")


def number(value: float | None) -> str:
    """Return a number with thin spaces between thousands, and decimals only where they say something."""
    if value is None:
        return "–"
    text = f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"
    return text.replace(",", "\N{NARROW NO-BREAK SPACE}")


def counted(count: float, one: str, more: str = "") -> str:
    """Return a number of things: `1 core`, `2 cores`."""
    return f"{number(count)} {one if count == 1 else more or one + 's'}"


def percent(value: float | None) -> str:
    """Return a part as a percentage."""
    return "–" if value is None else f"{value:.0%}"


def megabytes(value: float) -> str:
    """Return MiB as MiB or GiB."""
    return f"{value:.0f} MiB" if value < 10_000 else f"{value / 1024:.1f} GiB"


def address(name: str, sort: str) -> str:
    """Return the path of the page about a thing."""
    return f"/{_FOLDERS[sort]}/{quote(name, safe='')}"


def draining(node: Mapping[str, Any]) -> str:
    """Return what is to be said of a draining node of the overview: what is left on it."""
    return left_words(node["running"], node["environments"])


def left_words(actions: int, environments: int) -> str:
    """Return what is to be said of a draining node on which so much is left."""
    counts = ((actions, "action"), (environments, "environment"))
    left = ", ".join(counted(count, what) for count, what in counts)
    return f"draining: {left} left" if actions or environments else "drained"


def node_state(node: Mapping[str, Any]) -> str:
    """Return the words for the state of a node in a table: `draining` for one that is up and is so."""
    if not node["draining"]:
        return str(node["state"])
    return "draining" if node["state"] == "up" else f"{node['state']}, draining"


def quota_state(quota: Mapping[str, Any]) -> str:
    """Return the word for a quota of the overview: `full` for one that is open, and all of whose places are taken."""
    places = quota["concurrency"]
    full = quota["throttle"] == "open" and places is not None and quota["running"] >= places
    return "full" if full else str(quota["throttle"])


def state_class(state: str, fault: str = "") -> str:
    """Return the class of style of a state's word: a failure that is not ours looks otherwise."""
    if state in BAD and fault in ("program", "caller"):
        return "theirs"
    if state in (*BAD, "left"):
        return "bad"
    if state in (
        "waiting",
        "opening",
        "closing",
        "draining",
        "silent",
        "starting",
        "restoring",
        "evicting",
        "cancelled",
        "full",
        "paused",
        "lowered",
    ):
        return "warn"
    return "good" if state in ("running", "up", "open", "resident") else ""
