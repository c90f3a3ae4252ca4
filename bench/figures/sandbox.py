"""Figures of environments that are process trees: what they cost, and how near the usage that is counted comes to what was used."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench import environments
from bench.figures.registry import figure
from bench.tools import carry_out, one_core, peak_growth, under_way
from workers.cpu.abstract import Environment, EnvironmentSpec, ExecRequest, Holding
from workers.cpu.process.meter import LONGEST_SAMPLE_S
from workers.cpu.process.sandbox import ProcessSandbox

BURN_S, LIMIT_S = 0.3, 1.0
BURN = f"import time\nwhile time.process_time() < {BURN_S}: pass\n"
LATE = f"import os, time\nif os.fork() == 0:\n    while time.process_time() < {BURN_S}: pass\n    os._exit(0)\ntime.sleep(2)\nos.wait()\n"
SAMPLED = f"time.sleep({LONGEST_SAMPLE_S + 0.1})\n"
SPIN = "while :; do :; done"
BACK = Holding(background=True)


@figure("×")
def command_cost() -> float:
    """Return CPU time of an empty command, over that of starting a process."""
    with _environment() as one:
        carry_out(one, "true")
        command_s = min(_cost_s(lambda: carry_out(one, "true"), 20) for _ in range(10))
        return command_s / _cost_s(lambda: subprocess.run(["true"], check=True), 50)


@figure("ms")
def usage_beyond_burnt() -> float:
    """Return CPU time counted for a command whose grandchild burns 0.3 s, beyond that."""
    with _environment() as one:
        one.write_file("burn.py", (BURN + SAMPLED).encode())
        return 1e3 * (carry_out(one, 'sh -c "python3 -S burn.py; :"; true').cpu_s - BURN_S)


@figure("ms")
def usage_of_late_child() -> float:
    """Return CPU time counted for a command that waits late for a child that burns 0.3 s, beyond that."""
    with _environment() as one:
        one.write_file("late.py", (LATE + SAMPLED).encode())
        return 1e3 * (carry_out(one, "python3 -S late.py").cpu_s - BURN_S)


@figure("ms")
def usage_of_nothing() -> float:
    """Return CPU time counted for a command that does nothing."""
    with _environment() as one:
        carry_out(one, "true")
        return 1e3 * carry_out(one, "true").cpu_s


@figure("ms")
def background_time_error() -> float:
    """Return what a busy command in the background, beside others, ran for by its own count, beyond its CPU time."""
    with _environment(background="affinity", core_map=one_core()) as one:
        return 1e3 * run_beyond_used_s(one)


@figure("s")
def background_limit() -> float:
    """Return CPU time that a busy command in the background has had when its limit of 1 s is over."""
    with _environment(background="affinity") as one:
        return one.start(ExecRequest(action_id="figure", command=SPIN, holding=BACK, timeout_s=LIMIT_S)).wait().cpu_s


@figure("MiB")
def output_growth() -> float:
    """Return growth of the worker's memory while a command prints 200 MB, of which 1 kB is kept."""
    with _environment() as one, peak_growth() as growth:
        carry_out(one, "head -c 200000000 /dev/zero", output_limit_bytes=1000)
        return growth()


def run_beyond_used_s(environment: Environment) -> float:
    """Return by how many seconds the run of a busy command in the background differs from its CPU time, beside a busy one on each core."""
    cores = tuple(one_core().available)
    spin = "while [ ! -e go ]; do :; done"
    others = under_way(environment, f"{spin} & {spin} & {spin}", Holding(cores), "others")
    with others, under_way(environment, spin, BACK) as execution:
        time.sleep(2.0)  # while it has a part of a core
        environment.write_file("go", b"")
        outcome = execution.wait()
    return outcome.execution_s - outcome.cpu_s


@contextmanager
def _sandbox(**more: object) -> Iterator[ProcessSandbox]:
    with tempfile.TemporaryDirectory(prefix="tangram-figures-") as folder:
        box = ProcessSandbox(Path(folder) / "box", isolation="none", **more)  # type: ignore[arg-type]
        try:
            yield box
        finally:
            box.close()


@contextmanager
def _environment(**more: object) -> Iterator[Environment]:
    with _sandbox(**more) as box:
        yield box.open(EnvironmentSpec(id="figure"))


def _cost_s(action: Callable[[], object], times: int) -> float:
    """Return the CPU time of an action, of this process and of all that were or are below it; it is done many times."""
    before = environments.cpu_s()
    for _ in range(times):
        action()
    return (environments.cpu_s() - before) / times
