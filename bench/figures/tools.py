"""What several figures need: CPU time of this thread, the peak of this process's memory, a stack of their own."""

from __future__ import annotations

import gc
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from app.local import stack
from app.local.embedded import EmbeddedStack
from app.local.stack import StackPlan
from bench.figures.registry import NotMeasured
from workers.cpu.abstract import Environment, ExecOutcome, ExecRequest, Holding

MIB = 1 << 20


def cpu_s(run: Callable[[], object], tries: int = 3) -> float:
    """Return the least CPU time, in seconds, that `run` takes of this thread; what earlier figures left in memory is not collected."""
    gc.collect()
    gc.freeze()
    try:
        return min(_once(run) for _ in range(tries))
    finally:
        gc.unfreeze()


def _once(run: Callable[[], object]) -> float:
    before = time.thread_time()
    run()
    return time.thread_time() - before


def wait_s(run: Callable[[], object]) -> float:
    """Return how long `run` takes, in seconds."""
    before = time.perf_counter()
    run()
    return time.perf_counter() - before


@contextmanager
def peak_growth() -> Iterator[Callable[[], float]]:
    """Give what says by how many MiB this process's memory has been above what it was when the block began, at most. Linux."""
    before = _status_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    yield lambda: _status_mib("VmHWM") - before


def _status_mib(key: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) / 1024


@contextmanager
def running(plan: StackPlan) -> Iterator[EmbeddedStack]:
    """Run a stack in a folder of its own, once it is up."""
    with tempfile.TemporaryDirectory(prefix="tangram-figures-") as folder, stack.start(plan, Path(folder) / "state") as started:
        stack.wait_until_up(started, plan)
        yield started


def process_of(started: EmbeddedStack, name: str) -> psutil.Process:
    """Return a process of a stack."""
    return psutil.Process(json.loads(started.stack_file.read_text())["pids"][name])


def used_s(process: psutil.Process) -> float:
    """Return the CPU time that a process has used."""
    times = process.cpu_times()
    return float(times.user + times.system)


def until(condition: Callable[[], object], timeout_s: float = 120.0) -> None:
    """Wait until a condition holds. Raises `TimeoutError` when it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited in vain for {timeout_s:g} s")
        time.sleep(0.02)


def carry_out(environment: Environment, command: str, holding: Holding | None = None, **more: Any) -> ExecOutcome:
    """Carry a command out, which must succeed."""
    request = ExecRequest(action_id="figure", command=command, holding=holding or Holding(), **{"timeout_s": 60.0, **more})
    outcome = environment.start(request).wait()
    if outcome.status != "succeeded":
        raise NotMeasured(f"{command!r}: {outcome.status}: {outcome.reason}")
    return outcome


@contextmanager
def under_way(environment: Environment, command: str, holding: Holding, session: str, **more: Any) -> Iterator[list[ExecOutcome]]:
    """Have a command run as long as the block lasts; its outcome is there once it has ended."""
    request = ExecRequest(action_id="figure", command=command, holding=holding, session=session, **{"timeout_s": 600.0, **more})
    execution = environment.start(request)
    outcomes: list[ExecOutcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(execution.wait()))
    thread.start()
    try:
        until(lambda: execution.used() is not None or outcomes)
        yield outcomes
    finally:
        execution.kill("measured")
        thread.join()
