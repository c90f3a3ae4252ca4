"""Figures of a report of 100,000 actions on 256 cores."""

from __future__ import annotations

import random
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, insert

from app.cli.reporting import read_report, write_page
from app.journal.database import open_engine, sqlite_url
from app.journal.migrating import upgrade
from app.journal.models import Action, Job, Node, table
from app.journal.runs import finish_run, start_run
from bench.figures.registry import figure
from tangram.settings import Settings

ACTIONS = 100_000
ZERO = 1_700_000_000.0
"""When the run began."""

NODES, CORES = 4, 64
CLASSES = ("pytest", "make", "grep", "python", "cat", "git")


@figure("s")
def report_cpu() -> float:
    """Return CPU time of a report of 100,000 actions: reading the journal and writing the page."""
    return _report()[0]


@figure("MB")
def report_size() -> float:
    """Return size of the page of a report of 100,000 actions."""
    return _report()[1]


@cache
def _report() -> tuple[float, float]:
    with tempfile.TemporaryDirectory(prefix="tangram-figures-") as folder:
        journal, page = Path(folder) / "tangram.sqlite", Path(folder) / "report.html"
        upgrade(sqlite_url(journal))
        engine = open_engine(sqlite_url(journal))
        write_many(engine, ACTIONS)
        engine.dispose()
        began = time.process_time()
        write_page(read_report(Settings(), f"{journal}:last"), page)
        return time.process_time() - began, page.stat().st_size / 1e6


def write_many(engine: Engine, count: int) -> None:
    """Write a run of so many actions on four nodes with 64 cores each, over an hour."""
    draw = random.Random(7)
    actions: list[dict[str, Any]] = []
    for number in range(count):
        at = ZERO + draw.uniform(0, 3600)
        queue_s, execution_s = draw.expovariate(1.0), draw.lognormvariate(0.5, 1.0)
        node, core = f"n{number % NODES}", draw.randrange(CORES)
        granted, ended = at + queue_s, at + queue_s + 0.02 + execution_s
        failed = number % 50 == 0
        actions.append(
            {
                "id": f"a{number}", "position": number, "job": f"job-{number % 3}", "trajectory": f"t{number % 2000}", "environment": "e",
                "kind": "cpu.exec", "action_class": CLASSES[number % 6], "service": None, "quota": None, "priority": 5,
                "status": "failed" if failed else "succeeded", "reason": "it ended with 1" if failed else "", "attempts": 1,
                "header": {"kind": "cpu.exec"}, "message": None, "submitted_at": at, "received_at": at, "granted_at": granted,
                "started_at": granted + 0.01, "ended_at": ended, "node": node, "units": 1, "unit_s": ended - granted, "queue_s": queue_s,
                "overhead_s": 0.02, "execution_s": execution_s, "act_s": ended - at, "cpu_s": execution_s * 0.8,
                "resource": "cores", "core_ids": [core], "cell_ids": [], "background": False,
                "resized_at": granted + 0.5 if number % 7 == 0 else None,
            }
        )  # fmt: skip
    with engine.begin() as connection:
        connection.execute(table(Node).delete())
        described = {"cores": CORES, "cells": 0}
        nodes = [
            {"name": f"n{n}", "state": "up", "reason": "", "description": described, "joined_at": ZERO, "changed_at": ZERO}
            for n in range(NODES)
        ]
        connection.execute(insert(table(Node)), nodes)
        connection.execute(insert(table(Job)), [{"name": f"job-{n}", "first_seen_at": ZERO} for n in range(3)])
        connection.execute(insert(table(Action)), actions)
    run = start_run(engine, policy="elastic", trace="many.jsonl", jobs=[f"job-{n}" for n in range(3)], options={}, started_at=ZERO)
    finish_run(engine, run, summary={}, ended_at=ZERO + 7200)
