"""What containers cost and what they hold: overhead of a command, enforcement of grants, the price of idle environments.

`python -m bench.containers` needs a Docker engine on this machine, and an image with a shell (`--image`) and, for the
program with threads, python3. Overheads are of alternating rounds in one run: a container, process environments without and
with bubblewrap (where it works), and one `docker exec` a command. The exit code is 0 only if every target is met.

| figure       | how                                                                                                |
|--------------|----------------------------------------------------------------------------------------------------|
| overhead     | an empty command, from handing it over to its outcome                                              |
| grant        | writing other cores and a quota to the control groups of a session with nine processes             |
| enforcement  | core-seconds that the kernel counts for the environment's session, over a window of the wall clock |
| idle         | the same for all environments together, while none of them runs an action                          |
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median, quantiles

import psutil

from bench.tools import MIB, carry_out, under_way, until, wait_s
from tangram.errors import TangramError
from workers.cpu.abstract import Environment, EnvironmentSpec, Holding, Sandbox
from workers.cpu.control_files import Mounts, paths_of, read
from workers.cpu.docker.options import ContainerLimits, ContainerOptions
from workers.cpu.docker.sandbox import ContainerSandbox
from workers.cpu.errors import SessionUnavailable
from workers.cpu.process.sandbox import ProcessSandbox

NODE = "tangram-bench"
CORE = Holding((0,))
MS = 1e3
THREADS = """python3 -c '
import hashlib, threading
def work():
    block = bytes(1 << 20)
    while True: hashlib.sha256(block).digest()
for _ in range(8): threading.Thread(target=work).start()
'"""
"""A program with eight threads that compute side by side: the digest of a large block is computed without Python's lock."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure, and the most that it may be; None where nothing is asked of it."""

    name: str
    value: float
    unit: str
    detail: str = ""
    most: float | None = None
    least: float | None = None

    @property
    def met(self) -> bool:
        """Whether the target is met."""
        return (self.most is None or self.value <= self.most) and (self.least is None or self.value >= self.least)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return 0 if all targets are met."""
    parser = argparse.ArgumentParser(prog="python -m bench.containers", description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--image", required=True, help="image of the environments; it is not fetched")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of the overhead; each has 20 commands and 2 of `docker exec`")
    parser.add_argument("--idle", type=int, default=200, help="idle environments at once")
    parser.add_argument("--window-s", type=float, default=4.0, help="how long each use of cores is watched")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="tangram-bench-") as folder:
            figures = [*measure(Path(folder), options.image, options.rounds, options.window_s, options.idle)]
    except TangramError as error:
        print(f"bench.containers: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps({figure.name: {"value": figure.value, "unit": figure.unit, "met": figure.met} for figure in figures}, indent=2))
    else:
        print("\n".join(map(line, figures)))
    return 0 if all(figure.met for figure in figures) else 1


def line(figure: Figure) -> str:
    """Return a figure for a person."""
    least = f" ≥ {figure.least:g}" if figure.least is not None else ""
    most = f" ≤ {figure.most:g}" if figure.most is not None else ""
    target = f"{least}{most}  {'met' if figure.met else 'NOT MET'}" if least or most else ""
    return f"{figure.name:58}{figure.value:>10.3f} {figure.unit:8}{figure.detail:32}{target}"


def measure(folder: Path, image: str, rounds: int, window_s: float, idle: int) -> Iterator[Figure]:
    """Yield every figure."""
    spec = EnvironmentSpec(id="overhead")
    with _containers(folder / "containers", image) as containers:
        with ExitStack() as stack:
            plain = stack.enter_context(_opened(ProcessSandbox(folder / "plain", isolation="none")))
            ways = {"container": containers, "process": plain}
            with suppress(SessionUnavailable):
                ways["process with bubblewrap"] = stack.enter_context(_opened(ProcessSandbox(folder / "apart", isolation="bubblewrap")))
            yield from overhead({name: sandbox.open(spec) for name, sandbox in ways.items()}, rounds)
        containers.get(spec.id).close()
        yield from grants(containers, rounds * 20)
        yield from enforcement(containers, window_s)
        containers.get("enforcement").close()
        yield from idling(containers, idle, window_s)


def overhead(environments: Mapping[str, Environment], rounds: int) -> Iterator[Figure]:
    """Yield what an empty command takes, in alternating rounds, and what the first one of a session takes."""
    container_id = environments["container"].container.id  # type: ignore[attr-defined]
    ways: dict[str, tuple[Callable[[], None], int]] = {
        name: (partial(carry_out, environment, ":", CORE), 20) for name, environment in environments.items()
    }
    ways["docker exec"] = (partial(_docker_exec, container_id), 2)
    took: dict[str, list[float]] = {name: [] for name in ways}
    first: dict[str, list[float]] = {name: [] for name in environments}
    for run, _ in ways.values():
        run()
    for number in range(rounds):
        turn = number % len(ways)
        for name in [*list(ways)[turn:], *list(ways)[:turn]]:
            run, times = ways[name]
            took[name] += [wait_s(run) for _ in range(times)]
            if name in environments:
                first[name].append(wait_s(partial(carry_out, environments[name], ":", CORE, session=f"s{number}")))
    ours, theirs = median(took["container"]), median(took["docker exec"])
    for name, times_s in took.items():
        yield Figure(f"empty command, {name}, p50", median(times_s) * MS, "ms", _spread(times_s), most=5.0 if name == "container" else None)
    yield Figure("container over docker exec", ours / theirs, "", most=0.1)
    for name, times_s in first.items():
        yield Figure(f"first command of a session, {name}, p50", median(times_s) * MS, "ms", _spread(times_s))


def grants(sandbox: ContainerSandbox, times: int) -> Iterator[Figure]:
    """Yield what writing a grant and taking it back take, each to other cores than the one before."""
    environment = sandbox.open(EnvironmentSpec(id="grants"))
    carry_out(environment, "for n in 1 2 3 4 5 6 7 8; do sleep 600 & done; :", CORE)
    container = environment.container
    group = container.group.session("bench")
    for pid in container.group.processes():
        if pid != container.pid:
            group.add(pid)
    given, taken = [], []
    for number in range(times):
        cores = (number % 2,)
        given.append(wait_s(partial(group.grant, cores)))
        taken.append(wait_s(group.park))
    environment.close()
    yield Figure("grant, p50", median(given) * MS, "ms", _spread(given), most=1.0)
    yield Figure("take-back, p50", median(taken) * MS, "ms", _spread(taken), most=1.0)


def enforcement(sandbox: ContainerSandbox, window_s: float) -> Iterator[Figure]:
    """Yield the cores that a program with eight threads uses under one core, two, and a quarter of one, resized in flight."""
    environment = sandbox.open(EnvironmentSpec(id="enforcement"))
    group = f"{environment.container.pid}"
    with under_way(environment, THREADS, CORE) as execution:
        problem = "the program with eight threads did not begin: has the image python3?"
        until(lambda: (used := execution.used()) is not None and used.cpu_s > 0.5, 20.0, problem)
        for holding, wanted, name in (
            (CORE, 1.0, "8 threads on 1 core"),
            (Holding((0, 1)), 2.0, "8 threads on 2 cores, resized in flight"),
        ):
            execution.resize(holding)
            used = _used(group, window_s)
            yield Figure(name, used, "cores", f"over {window_s:g} s", least=wanted * 0.95, most=wanted * 1.05)


def idling(sandbox: ContainerSandbox, count: int, window_s: float) -> Iterator[Figure]:
    """Yield what environments cost while no action runs: `count` that have run one, then one with a program left running."""
    before = _engine_memory_mb()
    began = time.monotonic()
    opened = [sandbox.open(EnvironmentSpec(id=f"idle-{number}", memory_mb=64)) for number in range(count)]
    took_s = time.monotonic() - began
    for environment in opened:
        carry_out(environment, "cd /tmp; X=1", CORE)
    pids = [str(environment.container.pid) for environment in opened]
    used = _used_by_all(pids, window_s)
    own = [_memory_mb(pid) for pid in pids]
    shims = _engine_memory_mb() - before
    yield Figure(f"{count} idle environments, cores in all", used, "cores", f"over {window_s:g} s", most=0.01 * count)
    yield Figure("one idle environment, of a core", 100 * used / count, "%", most=1.0)
    yield Figure("one idle environment, memory of its container", median(own), "MB")
    yield Figure("one idle environment, memory of the engine for it", shims / count, "MB")
    yield Figure("opening one, one after the other", took_s / count, "s")
    carry_out(opened[0], "while :; do :; done & :", CORE)
    yield Figure("one idle environment with a busy program left in it", 100 * _used(pids[0], window_s), "%", "of a core", most=1.0)


@contextmanager
def _containers(base: Path, image: str) -> Iterator[ContainerSandbox]:
    options = ContainerOptions(image=image, pull="never", limits=ContainerLimits(memory_mb=256))
    with _opened(ContainerSandbox(base, node=NODE, options=options)) as sandbox:
        yield sandbox  # type: ignore[misc]


@contextmanager
def _opened(sandbox: Sandbox) -> Iterator[Sandbox]:
    try:
        yield sandbox
    finally:
        sandbox.close()


def _docker_exec(container_id: str) -> None:
    subprocess.run(["docker", "exec", container_id, "/bin/sh", "-c", ":"], check=True, capture_output=True)


def _spread(took: Sequence[float]) -> str:
    low, _, high = quantiles(took, n=4)
    return f"(IQR {low * MS:.3f}–{high * MS:.3f})"


def _used(pid: str, window_s: float) -> float:
    return _used_by_all([pid], window_s)


def _used_by_all(pids: Sequence[str], window_s: float) -> float:
    """Return the cores that the containers of these processes use in the mean of a window, by the kernel's own count."""
    before, began = sum(map(_cpu_s, pids)), time.monotonic()
    time.sleep(window_s)
    return (sum(map(_cpu_s, pids)) - before) / (time.monotonic() - began)


def _cpu_s(pid: str) -> float:
    folder, version = _folder(int(pid), "cpuacct")
    if version == 1:
        return int(read(f"{folder}/cpuacct.usage")) / 1e9
    return int(read(f"{folder}/cpu.stat").split()[1]) / 1e6


def _memory_mb(pid: str) -> float:
    folder, version = _folder(int(pid), "memory")
    return int(read(f"{folder}/{'memory.usage_in_bytes' if version == 1 else 'memory.current'}")) / MIB


def _folder(pid: int, controller: str) -> tuple[str, int]:
    """Return the folder of a container's control group, and its version."""
    mounts, paths = Mounts.of_this_process(), paths_of(pid)
    if controller in mounts.by_controller:
        return f"{mounts.by_controller[controller]}{paths[controller]}", 1
    return f"{mounts.unified}{paths[''].removesuffix('/init')}", 2


def _engine_memory_mb() -> float:
    names = ("dockerd", "containerd", "containerd-shim-runc-v2", "containerd-shim")
    found = (process for process in psutil.process_iter(["name"]) if process.info["name"][:15] in {name[:15] for name in names})
    return sum(process.memory_full_info().pss for process in found) / MIB


if __name__ == "__main__":
    sys.exit(main())
