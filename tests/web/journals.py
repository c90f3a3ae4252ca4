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
from scheduler.live.entries import ActionEnded, ActionGranted, ActionReceived, ActionResized, Entry, EnvironmentChanged
from scheduler.model.commands import Finish

if TYPE_CHECKING:
    from starlette.testclient import TestClient

View = Callable[..., "TestClient"]
"""Opens the page of a journal; settings may be other ones."""

NOTHING: Mapping[str, Any] = MappingProxyType({})
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
    id: str, submitted_at: float, granted_at: float | None = None, ended_at: float | None = None, *, header: Mapping[str, Any] = NOTHING,
    message: str = "", node: str = "n1", units: int = 2, cores: tuple[int, ...] | None = None, cells: tuple[int, ...] = (),
    resized: tuple[float, tuple[int, ...]] | None = None, job: str = "coding", kind: str = "cpu.exec", excerpt: Any = None, **end: Any,
) -> list[Entry]:  # fmt: skip
    """Return what a journal is told of an action of two cores, or with another `header`: as far as it has come, without any overhead."""
    cores = tuple(range(units)) if cores is None else cores
    units = len(cores) or len(cells) or 1
    whole = {"kind": kind, "cost": {"cores": [units]}, "job": job, "trajectory": f"of-{id}", "environment": f"in-{id}", **header}
    whole = {name: value for name, value in whole.items() if value is not None}
    told: list[Entry] = [ActionReceived(id=id, header=whole, message=message, submitted_at=submitted_at, received_at=submitted_at)]
    if granted_at is not None:
        grant = ActionGranted(id=id, attempt=1, node=node, units=units, core_ids=cores, cell_ids=cells, granted_at=granted_at)
        told.append(grant)
    if resized is not None:
        at, onto = resized
        told.append(ActionResized(id=id, attempt=1, core_ids=onto, units=len(onto) or units, background=not onto, at=at))
    if ended_at is not None:
        execution_s = 0.0 if granted_at is None else ended_at - granted_at
        parts = {"queue_s": ended_at - execution_s - submitted_at, "overhead_s": 0.0, "execution_s": execution_s, "started_at": granted_at}
        words = {"status": "succeeded", "reason": "", "cause": "", "unit_s": units * execution_s, "cpu_s": units * execution_s, **end}
        finish = Finish(id=id, by_worker=True, dop=units, kind=str(whole["kind"]), **{**parts, **words})
        told.append(ActionEnded(end=finish, at=ended_at, excerpt=excerpt))
    return told


def words_of(client: TestClient, path: str) -> str:
    """Return the words of a page, without its markup."""
    return " ".join(html.unescape(re.sub("<[^>]*>", "", client.get(path).text)).split())
