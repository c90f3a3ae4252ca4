"""Figures of the journal, which is on the way of every action, and of reading traces."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import median

from sqlalchemy import text

from app.journal.database import open_engine, sqlite_url
from app.journal.migrating import upgrade
from app.journal.writing import SqlJournal
from app.replay.traces import read_trace
from bench.figures.registry import figure
from bench.tools import cpu_s
from scheduler.live.entries import ActionEnded, ActionGranted, ActionReceived, Entry
from scheduler.model.commands import Finish

BATCH, ACTIONS, SINGLE = 64, 640, 100
TRAJECTORIES, STEPS = 83, 53
"""As many rollouts as a day's recordings have, and as many actions each."""


@figure("µs")
def journal_entry() -> float:
    """Return CPU time of an entry in a batch of 64, median over 30 batches."""
    return 1e6 * _written()[0]


@figure("ms")
def journal_commit() -> float:
    """Return CPU time of a commit of one entry, median over 300."""
    return 1e3 * _written()[1]


@figure("bytes")
def journal_action() -> float:
    """Return what an action that has ended takes in the journal, with its grant and all indexes, mean over 740."""
    return _written()[2]


@figure("×")
def trace_reading() -> float:
    """Return CPU time of reading a trace of 4,399 actions, over that of decoding its JSON."""
    action = {"think_s": 1.5, "action": {"kind": "cpu.exec", "work_s": 1}}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        rows = [{"schema": "tangram.trace/1", "trajectory": f"t{n}", "steps": [action] * STEPS} for n in range(TRAJECTORIES)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return cpu_s(lambda: read_trace(path)) / cpu_s(lambda: [json.loads(line) for line in path.read_text().splitlines()])


@cache
def _written() -> tuple[float, float, float]:
    """Write the lives of actions in batches, and those of others entry by entry.

    Returns the seconds of an entry, those of a commit, and the bytes of an action.
    """
    with tempfile.TemporaryDirectory() as folder:
        url = sqlite_url(Path(folder) / "tangram.sqlite")
        upgrade(url)
        engine = open_engine(url)
        with SqlJournal(engine) as journal:
            stages = zip(*(_life(f"action-{number}") for number in range(ACTIONS)), strict=True)
            batches = [stage[start : start + BATCH] for stage in stages for start in range(0, ACTIONS, BATCH)]
            per_entry = [_write_s(journal, batch) / BATCH for batch in batches]
            per_commit = [_write_s(journal, [entry]) for number in range(SINGLE) for entry in _life(f"single-{number}")]
        with engine.connect() as connection:
            size = connection.execute(
                text("SELECT sum(pgsize) FROM dbstat WHERE name LIKE '%actions%' OR name LIKE '%grants%'")
            ).scalar_one()
        engine.dispose()
    return median(per_entry), median(per_commit), size / (ACTIONS + SINGLE)


def _write_s(journal: SqlJournal, entries: Sequence[Entry]) -> float:
    began = time.thread_time()
    journal.write(entries)
    return time.thread_time() - began


def _life(id: str) -> tuple[Entry, Entry, Entry]:
    """Return the life of a command whose message is as long as on the wire."""
    header = {"kind": "cpu.exec", "cost": {"cores": [1, 2]}, "job": "coding", "trajectory": "t1", "environment": "e1"}
    parts = {"queue_s": 1.0, "overhead_s": 0.25, "execution_s": 2.0, "cpu_s": 1.5, "dop": 2}
    end = Finish(id=id, status="succeeded", reason="", by_worker=True, started_at=101.0, **parts)  # type: ignore[arg-type]
    return (
        ActionReceived(id=id, header=header, message="m" * 600, submitted_at=99.5, received_at=100.0),
        ActionGranted(id=id, attempt=1, granted_at=101.0, node="n1", units=2, core_ids=(4, 5), cell_ids=()),
        ActionEnded(end=end, at=103.0),
    )
