"""What an environment of a process sandbox costs: its open and first command, CPU time and memory, alone and among many.

`python -m bench.environments [--against CHECKOUT]` prints medians over rounds. Each round is a process of its own. With another checkout
the rounds alternate between the two, and the last column is this one's median over the other's. The exit code is 1 where that is above
`--most`.

| figure      | what it is, for one environment                                                                                 |
|-------------|-----------------------------------------------------------------------------------------------------------------|
| `alone_ms`  | time from the open to the end of the first command, one environment after the other                              |
| `alone_cpu` | CPU time of the worker and of all processes below it, from the open to the end of the close, in ms                |
| `crowd_ms`  | time until all environments of a crowd that are opened by several threads have had a command, over their number   |
| `crowd_cpu` | CPU time of these, as above                                                                                       |
| `crowd_mib` | memory of all processes that are there for them, shared parts divided by how many share them                      |
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

from workers.cpu.abstract import Environment, EnvironmentSpec, ExecRequest
from workers.cpu.process.sandbox import ProcessSandbox

ISOLATIONS = ("none", "bubblewrap")
UNITS = {"alone_ms": "ms", "alone_cpu": "ms", "crowd_ms": "ms", "crowd_cpu": "ms", "crowd_mib": "MiB"}
HERE = Path(__file__).parents[1]
ALONE, THREADS, TICKS_PER_S = 30, 16, os.sysconf("SC_CLK_TCK")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return 0 unless this checkout costs more than the other one may be exceeded by."""
    parser = argparse.ArgumentParser(prog="python -m bench.environments", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="folder of another checkout, measured in alternating rounds")
    parser.add_argument("--most", type=float, default=1.1, help="the most that a figure may be of the other checkout's (1.1)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each checkout and isolation (5)")
    parser.add_argument("--crowd", type=int, default=200, help="environments at once (200)")
    parser.add_argument("--measure", choices=ISOLATIONS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.measure:
        print(json.dumps(_measure(options.measure, options.crowd)))
        return 0
    is_within = True
    checkouts = [HERE, *([options.against.resolve()] if options.against else [])]
    for isolation in ISOLATIONS:
        for name, values in medians(isolation, checkouts, options.rounds, options.crowd).items():
            ratio = values[0] / values[-1]
            is_within = is_within and ratio <= options.most
            compared = f"{values[-1]:9.2f} {ratio:7.2f} ×" if options.against else ""
            print(f"{isolation:12}{name:12}{values[0]:9.2f} {UNITS[name]:4}{compared}", flush=True)
    return 0 if is_within else 1


def medians(isolation: str, checkouts: Sequence[Path] = (HERE,), rounds: int = 3, crowd: int = 200) -> dict[str, list[float]]:
    """Return the median of each figure in each checkout. Raises `CalledProcessError` where it cannot be measured."""
    seen: list[list[dict[str, float]]] = [[] for _ in checkouts]
    for number in range(rounds):
        order = list(zip(checkouts, seen, strict=True))
        for checkout, values in order if number % 2 else reversed(order):
            # By its path, since another checkout may not have it; with `-P` its folder is not searched for modules.
            argv = [sys.executable, "-P", __file__, "--measure", isolation, "--crowd", str(crowd)]
            path = {**os.environ, "PYTHONPATH": str(checkout)}
            values.append(json.loads(subprocess.run(argv, cwd=checkout, env=path, stdout=subprocess.PIPE, check=True).stdout))
    return {name: [median(each[name] for each in values) for values in seen] for name in UNITS}


def _measure(isolation: str, crowd: int) -> dict[str, float]:
    # What outlives its parent is counted below this process.
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
    with tempfile.TemporaryDirectory(prefix="tangram-bench-") as folder:
        box = ProcessSandbox(Path(folder) / "box", isolation=isolation)  # type: ignore[arg-type]
        try:
            _open(box, "first").close()
            took, before = [], cpu_s()
            for number in range(ALONE):
                began = time.perf_counter()
                one = _open(box, f"alone-{number}")
                took.append(time.perf_counter() - began)
                one.close()
            alone_cpu_s, before, before_mib = cpu_s() - before, cpu_s(), _memory_mib()
            began = time.perf_counter()
            with ThreadPoolExecutor(THREADS) as threads:
                opened = list(threads.map(lambda number: _open(box, f"crowd-{number}"), range(crowd)))
                crowd_s, crowd_mib = time.perf_counter() - began, _memory_mib() - before_mib
                list(threads.map(lambda one: one.close(), opened))
            return {
                "alone_ms": 1e3 * median(took),
                "alone_cpu": 1e3 * alone_cpu_s / ALONE,
                "crowd_ms": 1e3 * crowd_s / crowd,
                "crowd_cpu": 1e3 * (cpu_s() - before) / crowd,
                "crowd_mib": crowd_mib / crowd,
            }
        finally:
            box.close()


def _open(box: ProcessSandbox, name: str) -> Environment:
    """Open an environment and have it carry out a command."""
    environment = box.open(EnvironmentSpec(id=name))
    outcome = environment.start(ExecRequest(action_id=name, command="true", timeout_s=300.0)).wait()
    if outcome.exit_code != 0:
        raise RuntimeError(f"a command did not run: {outcome.status}, {outcome.reason}")
    return environment


def cpu_s() -> float:
    """Return the CPU time of this process and of all that are or were below it; those that nobody has waited for are still listed."""
    reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = time.process_time() + reaped.ru_utime + reaped.ru_stime
    for pid, fields in _below().items():
        try:
            spent += int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
        except OSError:  # it has ended since, and is among the children that were waited for
            continue
        spent += (int(fields[13]) + int(fields[14])) / TICKS_PER_S
    return spent


def _memory_mib() -> float:
    kept = 0
    for pid in (os.getpid(), *_below()):
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        kept += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return kept / 1024


def _below() -> dict[int, list[str]]:
    """Return the fields of `stat` behind the name of each process below this one."""
    found: dict[int, list[str]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            found[int(name)] = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue

    def is_below(pid: int) -> bool:
        while pid in found:
            pid = int(found[pid][1])
            if pid == os.getpid():
                return True
        return False

    return {pid: fields for pid, fields in found.items() if is_below(pid)}


if __name__ == "__main__":
    sys.exit(main())
