"""The journal is on the way of every action: bounds of its CPU time that only a change of order can break."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

from app.journal.database import open_engine, sqlite_url
from app.journal.writing import SqlJournal
from scheduler.live.entries import Entry
from tests.speed import slowness

SECONDS_PER_ENTRY = 300e-6
SECONDS_PER_COMMIT = 2.5e-3


def test_a_commit_costs_little(sqlite_path: Path, make: Any) -> None:
    # Given the lives of 640 actions with messages as the wire has them
    ids = [f"action-{number}" for number in range(640)]
    lives: list[list[Entry]] = [
        [make.received(id, message="m" * 600) for id in ids],
        [make.granted(id) for id in ids],
        [make.ended(id) for id in ids],
    ]
    engine, slower = open_engine(sqlite_url(sqlite_path)), slowness()
    with SqlJournal(engine) as journal:
        # When they are journaled in batches of 64
        per_entry = []
        for stage in lives:
            for start in range(0, len(stage), 64):
                began = time.thread_time()
                journal.write(stage[start : start + 64])
                per_entry.append((time.thread_time() - began) / 64)
        # And others one by one
        per_commit = []
        for number in range(100):
            for entry in (make.received(f"single-{number}"), make.granted(f"single-{number}"), make.ended(f"single-{number}")):
                began = time.thread_time()
                journal.write([entry])
                per_commit.append(time.thread_time() - began)
    engine.dispose()
    # Then both stay within their bounds
    slower = max(slower, slowness())
    assert statistics.median(per_entry) < SECONDS_PER_ENTRY * slower
    assert statistics.median(per_commit) < SECONDS_PER_COMMIT * slower
