"""What a command in the background gets, what it costs the commands in the foreground, and what a hand-over costs the worker.

`python -m bench.background [--image IMAGE] [--user NAME] [--rounds N] [--json]`. Containers are measured where an image with a
shell is named; the other kinds also with a worker of the user NAME, where this one is root. All of a node's commands have one core here.

| figure   | how                                                                                                             |
|----------|-----------------------------------------------------------------------------------------------------------------|
| busy     | what a busy program in the background gets beside a busy one in the foreground, in percent of what both get      |
| same     | the same, both in sessions of one environment                                                                   |
| asleep   | what it gets while the one in the foreground sleeps, in percent of that and what the core is still idle          |
| gap      | what a short command takes beside it, in percent of what it takes alone                                         |
| send     | the worker's time for sending a command of four processes to the background, in ms                               |
| recall   | the worker's time for giving it a core again, in ms                                                             |

The exit code is 0 only if every target is met: busy and same ≤ 5, asleep ≥ 90, send and recall ≤ 1; `PROMISED` says of what weaker
kinds no such thing is asked. All but the last two are ratios of figures of one round, so that other work on the machine changes little.
"""

from __future__ import annotations

import argparse
import json
import os
import pwd
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median, quantiles

import psutil

from bench.as_user import last_words, run_module
from bench.tools import carry_out, one_core, under_way
from workers.cpu.abstract import Environment, EnvironmentSpec, Holding, Sandbox
from workers.cpu.process.sandbox import ProcessSandbox

SPIN, SLEEP = "while :; do :; done", "sleep 600"
TREE = "sh -c 'sleep 600; :' & sleep 600 & wait"
SHORT = "i=0; while [ $i -lt 8000 ]; do i=$((i+1)); done"
BACK = Holding(background=True)
FIGURES = ("busy", "same", "asleep", "gap", "send", "recall")
MOST = {"busy": 5.0, "same": 5.0, "send": 1.0, "recall": 1.0}
LEAST = {"asleep": 90.0}
PROMISED = {"affinity": ("asleep", "send", "recall")}
"""What the weaker kinds promise, by means or sandbox."""
HAND_OVERS, SHORT_COMMANDS = 40, 20


@dataclass(slots=True)
class Row:
    """The figures of one sandbox: each a list of what was measured."""

    sandbox: str
    user: str
    means: str = ""
    problem: str = ""
    figures: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in FIGURES})

    def met(self, name: str) -> bool:
        """Return whether the median meets its target."""
        is_promised = name in PROMISED.get(self.sandbox, PROMISED.get(self.means, FIGURES))
        if self.problem or not self.figures[name] or not is_promised:
            return True
        value = median(self.figures[name])
        return LEAST.get(name, 0.0) <= value <= MOST.get(name, float("inf"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return 0 if all targets are met."""
    parser = argparse.ArgumentParser(prog="python -m bench.background", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--image", help="image of containers; it is not fetched")
    parser.add_argument("--user", default="nobody", help="who the unprivileged worker is, where this one is root")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--window-s", type=float, default=1.5, help="how long each program runs")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--only", help="measure one sandbox, as this user: words of `sandboxes`")
    options = parser.parse_args(arguments)
    if options.only is not None:
        row = Row(options.only, pwd.getpwuid(os.geteuid()).pw_name)
        measure(row, options.image, options.rounds, options.window_s)
        print(json.dumps(asdict(row)))
        return 0
    rows = [_apart(name, user, options) for user, name in sandboxes(options.user, bool(options.image))]
    print(json.dumps([_as_json(row) for row in rows], indent=2) if options.json else table(rows))
    return 0 if all(row.met(name) for row in rows for name in FIGURES) else 1


def sandboxes(other: str, has_image: bool) -> Iterator[tuple[str, str]]:
    """Yield who measures which sandbox: its kind and, for all but the best, how it holds the background."""
    own = pwd.getpwuid(os.geteuid()).pw_name
    is_root = os.geteuid() == 0
    for isolation in ("none", "bubblewrap"):
        yield own, f"process {isolation}"
        yield from ((own, f"process {isolation} affinity") for _ in range(is_root))
        yield from ((other, f"process {isolation}") for _ in range(is_root))
    if has_image:
        yield own, "container"


def _apart(name: str, user: str, options: argparse.Namespace) -> Row:
    """Measure in a process of its own, of that user."""
    arguments = ["--only", name, "--rounds", str(options.rounds), "--window-s", str(options.window_s)]
    arguments += ["--image", options.image] if options.image else []
    done = run_module("bench.background", *arguments, user=user)
    return Row(name, user, problem=last_words(done)) if done.returncode else Row(**json.loads(done.stdout))


def _made(name: str, base: Path, image: str | None) -> Sandbox:
    kind, *more = name.split(" ")
    if kind == "process":
        isolation, *means = more
        return _process(base, isolation, means[0] if means else "auto")
    return _containers(base, image or "")


def _process(base: Path, isolation: str, means: str) -> Sandbox:
    return ProcessSandbox(base, isolation=isolation, background=means, core_map=one_core())  # type: ignore[arg-type]


def _containers(base: Path, image: str) -> Sandbox:
    from workers.cpu.docker.options import ContainerOptions
    from workers.cpu.docker.sandbox import ContainerSandbox

    options = ContainerOptions(image=image, pull="never")
    return ContainerSandbox(base, node="tangram-bench", options=options, core_map=one_core())


def measure(row: Row, image: str | None, rounds: int, window_s: float) -> None:
    """Fill in the figures of a sandbox."""
    with tempfile.TemporaryDirectory(prefix="tangram-bench-", ignore_cleanup_errors=True) as folder:
        sandbox = _made(row.sandbox, Path(folder), image)
        try:
            row.means = sandbox.background
            for number in range(rounds):
                _round(row, sandbox, number, window_s)
            _hand_overs(row, sandbox.open(EnvironmentSpec(id="hand-over")))
        finally:
            sandbox.close()


def _round(row: Row, sandbox: Sandbox, number: int, window_s: float) -> None:
    front, back = (sandbox.open(EnvironmentSpec(id=f"{name}-{number}")) for name in ("front", "back"))
    core = Holding(one_core().available)
    for environment in (front, back):
        carry_out(environment, ":", core)
    short_s = _short(front, core)
    for name, environment, session in (("busy", back, "main"), ("same", front, "other")):
        with under_way(front, SPIN, core) as busy, under_way(environment, SPIN, BACK, session) as waiting:
            time.sleep(window_s)
            busy.kill("measured")
            waiting.kill("measured")
            theirs_s, got_s = busy.wait().cpu_s, waiting.wait().cpu_s
        row.figures[name].append(100 * got_s / (got_s + theirs_s))
    with under_way(front, SLEEP, core), under_way(back, SPIN, BACK) as waiting:
        idle_s = _idle_s(core)
        time.sleep(window_s)
        idle_s = _idle_s(core) - idle_s
        waiting.kill("measured")
        got_s = waiting.wait().cpu_s
    if got_s + idle_s > window_s / 20:  # else others had the core all the while
        row.figures["asleep"].append(100 * got_s / (got_s + idle_s))
    with under_way(back, SPIN, BACK):
        row.figures["gap"].append(100 * _short(front, core) / short_s)
    for environment in (front, back):
        environment.close()


def _hand_overs(row: Row, environment: Environment) -> None:
    core = Holding(one_core().available)
    with under_way(environment, TREE, core) as execution:
        time.sleep(0.2)  # its processes have started by then, or are some that start: the figure is the same
        for _ in range(HAND_OVERS):
            for name, holding in (("send", BACK), ("recall", core)):
                began = time.thread_time()
                execution.resize(holding)
                row.figures[name].append((time.thread_time() - began) * 1e3)


def _idle_s(core: Holding) -> float:
    """Return for how long a core has been idle, by the kernel's own count."""
    return sum(time.idle for number, time in enumerate(psutil.cpu_times(percpu=True)) if number in core.cores)


def _short(environment: Environment, holding: Holding) -> float:
    return median(carry_out(environment, SHORT, holding).execution_s for _ in range(SHORT_COMMANDS))


def table(rows: Sequence[Row]) -> str:
    """Return the figures for a person: medians, and the quartiles round them."""
    lines = [["sandbox", "user", "means", *FIGURES]]
    for row in rows:
        if row.problem:
            lines.append([row.sandbox, row.user, row.means, row.problem])
        else:
            lines.append([row.sandbox, row.user, row.means, *(_cell(row, name) for name in FIGURES)])
    widths = [max(len(line[column]) for line in lines if len(line) == len(lines[0])) for column in range(len(lines[0]))]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=False)).rstrip() for line in lines)


def _cell(row: Row, name: str) -> str:
    if len(row.figures[name]) < 2:
        return "–"
    low, middle, high = quantiles(row.figures[name], n=4)
    digits = 2 if name in ("send", "recall") else 1
    return f"{middle:.{digits}f} ({low:.{digits}f}–{high:.{digits}f}){'' if row.met(name) else ' NOT MET'}"


def _as_json(row: Row) -> dict[str, object]:
    figures = {name: {"median": median(values), "all": values, "met": row.met(name)} for name, values in row.figures.items() if values}
    return {"sandbox": row.sandbox, "user": row.user, "means": row.means, "problem": row.problem, "figures": figures}


if __name__ == "__main__":
    sys.exit(main())
