"""What several benchmarks and figures need: times, the peak of this process's memory, commands, a stack of their own."""

from __future__ import annotations

import argparse
import gc
import json
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import psutil

from app.local.processes import wait_until
from tangram.errors import TangramError
from workers.cpu.abstract import Environment, ExecOutcome, ExecRequest, Execution, Holding
from workers.cpu.cores import CoreMap

if TYPE_CHECKING:  # what needs no stack runs with a system's Python, too
    from app.local.embedded import EmbeddedStack
    from app.local.stack import StackPlan

MIB = 1 << 20


class NotMeasured(TangramError):
    """Raised when something cannot be measured here; the message says what is missing."""


class Parser(argparse.ArgumentParser):
    """Tells of a wrong option in one line."""

    def error(self, message: str) -> NoReturn:
        """End the program."""
        self.exit(2, f"{self.prog.removeprefix('python -m ')}: {message}\n")


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def one_core() -> CoreMap:
    """Return the last core of this process."""
    return CoreMap(CoreMap.of_this_process().available[-1:])


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
    from app.local import stack

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


def until(condition: Callable[[], object], timeout_s: float = 120.0, problem: str = "waited in vain") -> None:
    """Wait until a condition holds. Raises `NotMeasured` with the problem when it does not in time."""
    if not wait_until(lambda: bool(condition()), timeout_s):
        raise NotMeasured(f"{problem}, for {timeout_s:g} s")


def carry_out(environment: Environment, command: str, holding: Holding | None = None, **more: Any) -> ExecOutcome:
    """Carry a command out, which must succeed."""
    request = ExecRequest(action_id="bench", command=command, holding=holding or Holding(), **{"timeout_s": 60.0, **more})
    outcome = environment.start(request).wait()
    if outcome.status != "succeeded":
        raise NotMeasured(f"{command!r}: {outcome.status}: {outcome.reason}")
    return outcome


@contextmanager
def under_way(environment: Environment, command: str, holding: Holding, session: str = "main") -> Iterator[Execution]:
    """Have a command run as long as the block lasts."""
    request = ExecRequest(action_id="bench", command=command, holding=holding, session=session, timeout_s=600.0)
    execution = environment.start(request)
    thread = threading.Thread(target=execution.wait)
    thread.start()
    try:
        until(lambda: execution.used() is not None or not thread.is_alive())
        yield execution
    finally:
        execution.kill("measured")
        thread.join()
