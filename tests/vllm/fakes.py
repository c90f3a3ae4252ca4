"""A vLLM service whose server is `fake_server.py`, and what a test asks it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from app.services_file import ServiceConfig
from workers.gpu.device_memory import DeviceMemory
from workers.gpu.devices import Device
from workers.gpu.engines.vllm.engine import VllmEngine

CUDA = [Device(f"cuda:{index} (made up)", "cuda", 10_000, f"cuda:{index}") for index in range(2)]
CPU = [Device("cpu:0 (no GPU here)", "cpu", 10_000, "cpu")]


@dataclass
class FileMemory:
    """Measures the GPU that the fake server pretends to hold."""

    folder: Path

    def total_mb(self, device: Device) -> float:
        return 80_000.0

    def used_mb(self, device: Device) -> float | None:
        return 0.0

    def held_mb(self, device: Device, pids: Collection[int]) -> float | None:
        return float((self.folder / "memory").read_text()) if pids else 0.0


@dataclass
class Fake:
    """The folder by which a test and a server talk, see `fake_server.py`."""

    folder: Path
    models: Path
    python: Path
    engines: list[VllmEngine] = field(default_factory=list)

    def config(self, task: str = "score", **more: Any) -> ServiceConfig:
        """Return the table of a service."""
        vllm = {"python": self.python, "start_timeout_s": 20.0, "env": {"FAKE_DIR": str(self.folder)}, "process_mb": 500.0}
        table = {"engine": "vllm", "task": task, "model": self.models / ("rm-small" if task == "score" else "teacher-0")}
        vllm |= more.pop("vllm", {})
        return ServiceConfig.model_validate({**table, "memory_mb": 9000.0, "max_concurrency": 4, "cells": [1, 2], **more, "vllm": vllm})

    def engine(self, task: str = "score", **more: Any) -> VllmEngine:
        """Return an absent engine."""
        return self.make("rm", self.config(task, **more), self.folder, self.memory)

    @property
    def memory(self) -> FileMemory:
        """What measures the devices."""
        return FileMemory(self.folder)

    def make(self, name: str, config: ServiceConfig, state_dir: Path, memory: DeviceMemory) -> VllmEngine:
        """Make an engine, as hosts have them made."""
        engine = VllmEngine(name, config, state_dir, memory)
        self.engines.append(engine)
        return engine

    def be(self, what: str, text: str = "") -> None:
        """Have the server be so from now on."""
        (self.folder / what).write_text(text)

    def no_longer(self, what: str) -> None:
        """Have the server be so no longer."""
        (self.folder / what).unlink()

    def journal(self) -> list[str]:
        """Return what has happened."""
        path = self.folder / "journal"
        return path.read_text().splitlines() if path.exists() else []

    def servers(self) -> list[int]:
        """Return the ids of the server processes that were started, in order."""
        return [int(line.split()[1]) for line in self.journal() if line.startswith("started")]

    def read(self, what: str) -> Any:
        """Return what the server has written about itself."""
        return json.loads((self.folder / what).read_text())


def fake_python(folder: Path, *, has_vllm: bool = True) -> Path:
    """Write an interpreter that says whether it has vLLM and runs the fake server."""
    program, script = folder / "python", Path(__file__).with_name("fake_server.py")
    program.write_text(f'#!/bin/sh\n[ "$1" = -I ] && exit {0 if has_vllm else 3}\nexec {sys.executable} {script} "$@"\n')
    program.chmod(0o755)
    return program


def until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Wait for a condition."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.005)


def gone(pid: int) -> bool:
    """Say whether a process does not run any more."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
