"""A journal with actions at given times, written as the scheduler writes it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from app.journal.database import open_engine
from app.journal.runs import finish_run, start_run
from app.journal.writing import SqlJournal
from scheduler.live.entries import ActionEnded, ActionGranted, ActionReceived, ActionResized, Entry, EnvironmentChanged, NodeChanged
from scheduler.model.commands import Finish
from tests.journals import new_journal

ZERO = 1_700_000_000.0
"""The time 0 of scenes."""


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

    def action(
        self, at: float, granted: float | None = None, ended: float | None = None, *, id: str = "", cores: tuple[int, ...] = (0,),
        cells: tuple[int, ...] = (), node: str = "n1", status: str = "succeeded", reason: str = "", cause: str = "",
        message: str = "[]", cpu_s: float = 0.0, memory_mb: int | None = None, resident_mb: int | None = None,
        resized: tuple[float, tuple[int, ...]] | None = None, unit_s: float | None = None, **header: Any,
    ) -> str:  # fmt: skip
        """Submit an action, and grant and end it where there are times for that; its overhead is 0."""
        self._number += 1
        id = id or f"a{self._number}"
        words = {"kind": "cpu.exec", "cost": {"cores": [1]}, "job": "coding", "trajectory": "t1", "environment": "e1", **header}
        declared = {name: value for name, value in words.items() if value is not None}
        entries: list[Entry] = [ActionReceived(id=id, header=declared, message=message, submitted_at=ZERO + at, received_at=ZERO + at)]
        units = len(cores) or len(cells) or 1
        if granted is not None:
            grant = ActionGranted(id=id, attempt=1, node=node, units=units, core_ids=cores, cell_ids=cells, granted_at=ZERO + granted)
            entries.append(grant)
        if resized is not None:
            when, onto = resized
            entries.append(ActionResized(id=id, attempt=1, core_ids=onto, units=len(onto) or units, background=not onto, at=ZERO + when))
        if ended is not None:
            queue_s = (granted if granted is not None else ended) - at
            execution_s = ended - granted if granted is not None else 0.0
            end = Finish(
                id=id, status=status, reason=reason, cause=cause, by_worker=True, started_at=None if granted is None else ZERO + granted,  # type: ignore[arg-type]
                queue_s=queue_s, overhead_s=0.0, execution_s=execution_s, cpu_s=cpu_s, dop=units,
                unit_s=units * execution_s if unit_s is None else unit_s,
                kind=str(words["kind"]), memory_mb=memory_mb, resident_mb=resident_mb,
            )  # fmt: skip
            entries.append(ActionEnded(end=end, at=ZERO + ended))
        self.write(*entries)
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
