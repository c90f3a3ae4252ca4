"""Figures of nine teachers on memory for three: CPU devices count the process's own memory, so it shows in the worker's resident set."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import psutil

from app.local import stack
from app.local.stack import StackPlan
from bench.figures.registry import figure
from bench.tools import process_of, running
from tangram import Client, Settings

TEACHERS, ROOM, HIDDEN = 9, 3, 768
SEQUENCES = [[5, 17, 33, 200, 7], list(range(40, 72))]


@figure("× their files")
def teachers_growth() -> float:
    """Return growth of a worker's memory once nine teachers were asked twice, over the files of the three that have room."""
    return _grown()[0]


@figure("× their files")
def teachers_peak() -> float:
    """Return most growth of a worker's memory while nine teachers are asked twice, over the files of the three that have room."""
    return _grown()[1]


@cache
def _grown() -> tuple[float, float]:
    """Ask each teacher, twice; return by how much the worker's memory has grown at the end, and at most."""
    from app.tiny_models import make_tiny

    names = [f"teacher-{index}" for index in range(TEACHERS)]
    with tempfile.TemporaryDirectory(prefix="tangram-figures-") as name:
        folder = Path(name)
        make_tiny(folder / "first", "teacher", 99)
        for index, teacher in enumerate(names):
            make_tiny(folder / teacher, "teacher", index, HIDDEN)
        (folder / "services.toml").write_text("\n".join([_table("first", 5), *(_table(teacher, 45) for teacher in names)]))
        room = ROOM * (folder / names[0] / "model.safetensors").stat().st_size
        plan = StackPlan(nodes=0, api_nodes=0, cells=ROOM, cell_memory_mb=45, services_file=folder / "services.toml")
        with running(plan) as started, Client(settings=stack.settings_of(started, Settings())) as client:
            worker = process_of(started, "gpu-0")
            client.logprobs("first", SEQUENCES)  # what torch and transformers take for the first call of all is no model's
            before = worker.memory_info().rss
            with _watched(worker) as seen:
                for teacher in [*names, *names]:
                    client.logprobs(teacher, SEQUENCES)
                end = worker.memory_info().rss
    return (end - before) / room, (max(seen) - before) / room


@contextmanager
def _watched(process: psutil.Process) -> Iterator[list[int]]:
    """Note a process's resident memory all the while."""
    seen, over = [process.memory_info().rss], threading.Event()

    def watch() -> None:
        while not over.wait(0.005):
            seen.append(process.memory_info().rss)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def _table(name: str, memory_mb: int) -> str:
    return f'[services.{name}]\nengine = "torch"\ntask = "logprobs"\nmodel = "{name}"\ncells = [1]\nmemory_mb = {memory_mb}\n'
