"""Journals that a page is served from in this process, and what a scheduler shows beside them."""

from __future__ import annotations

import html
import re
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from app.journal.database import open_engine, snapshot
from app.journal.overview import Document, overview, read_present
from app.journal.recent import Recent
from app.journal.writing import SqlJournal
from scheduler.live.entries import ActionEnded, ActionGranted, ActionReceived, Entry, EnvironmentChanged
from scheduler.model.commands import Finish

if TYPE_CHECKING:
    from starlette.testclient import TestClient

View = Callable[..., "TestClient"]
"""Opens the page of a journal; settings may be other ones."""

TOKEN = "a-token-for-tests-0123"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
LOST = {"status": "lost", "cause": "node_lost", "reason": "node n2 was lost", "job": "unlucky"}

SHOWN: dict[str, Any] = {
    "policy": "elastic", "epoch": 3, "decisions": 5, "resizes": 0, "restores": 0, "decision_us_p50": 1, "decision_us_p99": 2,
    "nodes": {"n1": {"beat_ago_s": 0.2, "busy_cores": None}},
    "quotas": {
        "search": {
            "names": ["search"], "rate_per_s": None, "concurrency": 2, "tokens_per_min": None, "running": 2,
            "opens_in_s": None, "throttle": "open", "factor": 1.0,
        }
    },
}  # fmt: skip


DESCRIBED: dict[str, Any] = {"name": "n1", "kinds": ["cpu"], "cores": 2, "cells": 0, "memory_mb": 100}


def write(url: str, *entries: Entry) -> None:
    """Have a scheduler write entries into a journal."""
    engine = open_engine(url)
    with SqlJournal(engine) as journal:
        journal.write(list(entries))
    engine.dispose()


def stand(url: str, id: str, state: Any = "open", **changes: Any) -> None:
    """Have an environment stand on n1, or be in another state."""
    words: dict[str, Any] = {"node": "n1", "job": "coding", "trajectory": "t", "memory_mb": 1, "pod_cores": 0, "at": time.time(), **changes}
    write(url, EnvironmentChanged(id=id, state=state, **words))


def seen(url: str, shown: dict[str, Any] | None) -> Document:
    engine = open_engine(url)
    with snapshot(engine) as connection:
        found = overview(read_present(connection, time.time()), Recent(), shown)
    engine.dispose()
    return found


def action(
    id: str,
    submitted_at: float,
    granted_at: float | None = None,
    ended_at: float | None = None,
    header: Mapping[str, Any] = MappingProxyType({}),
    **words: Any,
) -> list[Entry]:
    """Return what a journal is told of an action of two cores, or with another `header`: as far as it has come, without any overhead."""
    given = {"status": "succeeded", "job": "coding", "kind": "cpu.exec", "cause": "", "reason": "", "units": 2, "excerpt": None, **words}
    whole = {
        "kind": given["kind"],
        "cost": {"cores": [given["units"]]},
        "job": given["job"],
        "trajectory": f"of-{id}",
        "environment": f"in-{id}",
        **header,
    }
    told: list[Entry] = [ActionReceived(id=id, header=whole, message="", submitted_at=submitted_at, received_at=submitted_at)]
    if granted_at is not None:
        cores = tuple(range(given["units"]))
        told.append(ActionGranted(id=id, attempt=1, node="n1", units=len(cores), core_ids=cores, cell_ids=(), granted_at=granted_at))
    if ended_at is not None:
        began = ended_at if granted_at is None else granted_at
        parts = {"queue_s": began - submitted_at, "overhead_s": 0.0, "execution_s": ended_at - began, "dop": given["units"]}
        ends = {name: given[name] for name in ("status", "reason", "cause", "kind")}
        unit_s = given["units"] * (ended_at - began)
        end = Finish(id=id, by_worker=True, started_at=granted_at, unit_s=unit_s, cpu_s=unit_s, **ends, **parts)
        told.append(ActionEnded(end=end, at=ended_at, excerpt=given["excerpt"]))
    return told


def words_of(client: TestClient, path: str) -> str:
    """Return the words of a page, without its markup."""
    return " ".join(html.unescape(re.sub("<[^>]*>", "", client.get(path).text)).split())
