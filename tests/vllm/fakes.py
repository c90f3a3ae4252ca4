"""A vLLM service whose server is `fake_server.py`, and what a test asks it."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from app.services_file import ServiceConfig
from tests.engines.waiting import until
from tests.vllm import fake_gpus
from workers.gpu.device_memory import CpuMemory, DeviceMemory
from workers.gpu.devices import Device

if TYPE_CHECKING:
    from workers.gpu.engines.vllm.engine import VllmEngine

CUDA = [Device(f"cuda:{index} (made up)", "cuda", 10_000, f"cuda:{index}") for index in range(2)]
CPU = [Device("cpu:0 (no GPU here)", "cpu", 10_000, "cpu")]


class FakeDevices:
    """The memory of made-up GPUs, one object for all engines of a test; CPU devices have their own."""

    def __init__(self, folder: Path, total_mb: float = 10_000.0, *, matching: bool = True, lag_s: float = 0.0) -> None:
        """Make GPUs for `CUDA` in a folder.

        Without `matching`, the driver's process ids are those of another namespace. The driver takes `lag_s` seconds to free the
        memory of a process that has ended.
        """
        self.folder, self.matching, self._lag_s = folder, matching, lag_s
        self._ended: dict[tuple[str, int], tuple[float, float]] = {}
        self._seen: dict[str, dict[int, float]] = {}
        fake_gpus.make(folder, [name_of(device) for device in CUDA], total_mb)

    def total_mb(self, device: Device) -> float:
        if device.kind == "cpu":
            return CpuMemory().total_mb(device)
        return fake_gpus.total_mb(self.folder, name_of(device))

    def used_mb(self, device: Device) -> float | None:
        return sum(self._held(device).values()) if device.kind == "cuda" else None

    def held_mb(self, device: Device, pids: Collection[int]) -> float | None:
        if device.kind == "cpu":
            return CpuMemory().held_mb(device, pids)
        if not self.matching:
            return None
        return sum(mb for pid, mb in self._held(device).items() if pid in pids)

    def others(self, device: Device, mb: float) -> None:
        """Have a program that is not ours hold so much of a GPU from now on, as long as this process lives."""
        fake_gpus.hold(self.folder, name_of(device), os.getppid(), mb, "others")

    def of_others(self, device: Device) -> float:
        """Return what programs that are not ours hold."""
        return fake_gpus.held_mb(self.folder, name_of(device)).get(os.getppid(), 0.0)

    def _held(self, device: Device) -> dict[int, float]:
        """Return what each process holds, also one that has ended a moment ago."""
        name, now = name_of(device), time.monotonic()
        held, before = fake_gpus.held_mb(self.folder, name), self._seen.get(name, {})
        self._seen[name] = held
        self._ended |= {(name, pid): (now, mb) for pid, mb in before.items() if pid not in held}
        lagging = {pid: mb for (gpu, pid), (since, mb) in self._ended.items() if gpu == name and now - since < self._lag_s}
        return {**lagging, **held}


def name_of(device: Device) -> str:
    """Return the name of a made-up GPU, as servers find it in `CUDA_VISIBLE_DEVICES`."""
    return device.uuid or device.torch_device.partition(":")[2]


@dataclass
class Fake:
    """The folder by which a test and a server talk, see `fake_server.py`."""

    folder: Path
    models: Path
    python: Path
    engines: list[VllmEngine] = field(default_factory=list)
    nature: dict[str, Any] = field(default_factory=dict)
    """What differs from the `NATURE` of `fake_server.py`."""
    memory: FakeDevices = None  # type: ignore[assignment]
    """The GPUs of its servers; none given: its own."""

    def __post_init__(self) -> None:
        self.memory = self.memory or FakeDevices(self.folder / "gpus")

    def config(self, task: str = "score", **more: Any) -> ServiceConfig:
        """Return the table of a service."""
        vllm = {"python": self.python, "start_timeout_s": 60.0, "env": self.environment(), "process_mb": 500.0}
        table = {"engine": "vllm", "task": task, "model": self.models / ("rm-small" if task == "score" else "teacher-0")}
        vllm |= more.pop("vllm", {})
        return ServiceConfig.model_validate({**table, "memory_mb": 9000.0, "max_concurrency": 4, "cells": [1, 2], **more, "vllm": vllm})

    def environment(self) -> dict[str, str]:
        """Return the variables that tell a server about this folder and its GPUs."""
        return {"FAKE_DIR": str(self.folder), "FAKE_GPUS": str(self.memory.folder), "FAKE_NATURE": json.dumps(self.nature)}

    def engine(self, task: str = "score", **more: Any) -> VllmEngine:
        """Return an absent engine."""
        return self.make("rm", self.config(task, **more), self.folder, self.memory)

    def started(self, task: str = "score", **more: Any) -> VllmEngine:
        """Return an engine that is resident on the first GPU."""
        engine = self.engine(task, **more)
        engine.start(CUDA[:1])
        return engine

    def make(self, name: str, config: ServiceConfig, state_dir: Path, memory: DeviceMemory) -> VllmEngine:
        """Make an engine, as hosts have them made."""
        from workers.gpu.engines.vllm.engine import VllmEngine

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

    def noted(self, *words: str) -> list[str]:
        """Return what has happened whose first word is one of these."""
        return [line for line in self.journal() if line.split()[0] in words]

    def servers(self) -> list[int]:
        """Return the ids of the server processes that were started, in order."""
        return [int(line.split()[1]) for line in self.noted("started")]

    def argument(self, option: str) -> str:
        """Return what the last server was given for an option."""
        words: list[str] = self.read("arguments")
        return words[words.index(option) + 1]

    def read(self, what: str) -> Any:
        """Return what the server has written about itself."""
        return json.loads((self.folder / what).read_text())


def fake_python(folder: Path, *, has_vllm: bool = True) -> Path:
    """Write an interpreter that says whether it has vLLM and runs the fake server."""
    program, script = folder / "python", Path(__file__).with_name("fake_server.py")
    program.write_text(f'#!/bin/sh\n[ "$1" = -I ] && exit {0 if has_vllm else 3}\nexec {sys.executable} -S {script} "$@"\n')
    program.chmod(0o755)
    return program


def summed(ids: Sequence[int]) -> float:
    """Return what the server scores ids with, unless it has other weights."""
    return sum(place * (token / 1000.0) for place, token in enumerate(ids, 1))


def when(condition: Callable[[], object], act: Callable[[], object]) -> None:
    """Do something as soon as a condition holds, from a thread of its own."""

    def wait() -> None:
        until(condition)
        act()

    threading.Thread(target=wait).start()


def gone(pid: int) -> bool:
    """Say whether a process does not run any more."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
