"""A journal with actions at given times, written as the scheduler writes it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from app.journal.database import open_engine
from app.journal.runs import finish_run, start_run
from app.journal.writing import SqlJournal
from scheduler.live.entries import Entry, EnvironmentChanged, NodeChanged
from tests.journals import new_journal
from tests.web.journals import action

ZERO = 1_700_000_000.0
"""The time 0 of scenes."""
OF_GRANT = {"cores", "cells", "node", "message", "resized"}
OF_END = {"status", "reason", "cause", "cpu_s", "memory_mb", "resident_mb", "unit_s", "queue_s", "overhead_s", "execution_s", "started_at"}
"""What is said of an action beside its header."""


class Scene:
    """The journal of the state folder below `folder`. Times are seconds after `ZERO`."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "state" / "tangram.sqlite"
        self.path.parent.mkdir(parents=True)
        self.engine = open_engine(new_journal(self.path))
        self._number = 0
        self.node("n1", cores=4)

    def write(self, *entries: Entry) -> None:
        with SqlJournal(self.engine) as journal:
            journal.write(list(entries))

    def node(self, name: str, cores: int = 0, cells: int = 0, services: dict[str, Any] | None = None) -> None:
        description = {"cores": cores, "cells": cells, "services": services or {}}
        self.write(NodeChanged(name=name, state="up", description=description, at=ZERO))

    def run(self, policy: str = "elastic", jobs: tuple[str, ...] = ("coding",), *, ended: bool = True, until: float = 1000.0) -> str:
        run = start_run(self.engine, policy=policy, trace="folder/rollouts.jsonl", jobs=jobs, options={}, started_at=ZERO)
        if ended:
            finish_run(self.engine, run, summary={"mean_act": 1.0, "step_duration": 9.0}, ended_at=ZERO + until)
        return run

    def action(self, at: float, granted: float | None = None, ended: float | None = None, *, id: str = "", **words: Any) -> str:
        """Submit an action of one core, and grant and end it where there are times for that; no overhead unless given. See `action`."""
        self._number += 1
        id = id or f"a{self._number}"
        header = {"cost": {"cores": [1]}, "trajectory": "t1", "environment": "e1"}
        header |= {name: words.pop(name) for name in words.keys() - OF_GRANT - OF_END}
        if "resized" in words:
            words["resized"] = (ZERO + words["resized"][0], words["resized"][1])
        granted_at, ended_at = (None if time is None else ZERO + time for time in (granted, ended))
        usual = {"cores": (0,), "message": "[]", "cpu_s": 0.0}
        self.write(*action(id, ZERO + at, granted_at, ended_at, header=header, **{**usual, **words}))
        return id

    def opening(self, at: float, granted: float, ended: float, *, environment: str = "e1", memory_mb: int = 512, **header: Any) -> str:
        cost = {"cores": [1], "memory_mb": [memory_mb]}
        return self.action(at, granted, ended, kind="cpu.open", cost=cost, environment=environment, **header)

    def closing(self, at: float, ended: float, *, environment: str = "e1", **header: Any) -> str:
        return self.action(at, at, ended, kind="cpu.close", cost={}, cores=(), environment=environment, **header)

    def pod(self, cores: int, opened: float, ended: float, *, environment: str = "e1", trajectory: str = "t1") -> None:
        words = {"id": environment, "node": "n1", "job": "coding", "trajectory": trajectory, "memory_mb": 512, "pod_cores": cores}
        self.write(
            EnvironmentChanged(state="open", at=ZERO + opened, **words), EnvironmentChanged(state="closed", at=ZERO + ended, **words)
        )


def now() -> float:
    """Return this moment in the time of scenes."""
    return time.time() - ZERO
