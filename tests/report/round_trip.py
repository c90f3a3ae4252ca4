"""From a live replay to a trace, and from the trace to a simulation: how near the two come.

`python -m tests.report.round_trip` replays the bundled rollouts with their commands, and prints both. On a machine that other programs use,
commands take longer than they would; `--waiting` replaces each by one that waits as long as it took when it was recorded.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from app.replay.traces import read_trace, write_trace
from scheduler.sim.trace import Trace, TraceAction
from tests.cli.forked import forked
from tests.cli.support import ROOT, tangram

BUNDLED = ROOT / "examples" / "rollouts.jsonl"
CORES = "2"


def waiting(trace: Trace) -> Trace:
    """Return a trace whose commands only wait, in empty environments: how long they take does not depend on what else the machine does."""

    def wait(action: TraceAction) -> TraceAction:
        return replace(action, command=None, cpu_s=0.0, extra={}) if action.kind.startswith("cpu.") else action

    trajectories = []
    for one in trace.trajectories:
        steps = tuple(replace(step, actions=tuple(map(wait, step.actions))) for step in one.steps)
        trajectories.append(replace(one, steps=steps, extra={}))
    return replace(trace, trajectories=tuple(trajectories))


def round_trip(folder: Path, path: Path, policy: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Replay a trace live, export the run and simulate it; return what both came to."""
    machine = ("--policy", policy, "--cores", CORES, "--gpus", "2", "--json")
    live = _read(tangram(folder, "replay", str(path), "--live", "--speed", "4", *machine))
    _read(forked("export", live["run"], "-o", "exported.jsonl", cwd=folder))
    simulated = _read(forked("replay", "exported.jsonl", "--simulate", *machine, cwd=folder))
    return live, simulated


def _read(done: CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) if done.stdout else {}


def without_overhead(document: dict[str, Any]) -> float:
    """Return the mean ACT of what a simulation knows: it has no overhead but restores."""
    return float(document["mean_queue"] + document["mean_execution"])


def main() -> None:
    """Print the figures of both, and by how much they differ."""
    with tempfile.TemporaryDirectory() as name:
        folder, path = Path(name), BUNDLED
        if "--waiting" in sys.argv[1:]:
            path = folder / "waiting.jsonl"
            with path.open("w") as stream:
                write_trace(waiting(read_trace(BUNDLED)), stream)
        for policy in ("fcfs", "elastic"):
            live, simulated = round_trip(folder, path, policy)
            for words, of in (("step", lambda one: one["step_duration"]), ("mean ACT without overhead", without_overhead)):
                print(f"{policy}: {words} {of(live):.2f} s live, {of(simulated):.2f} s simulated, {of(simulated) / of(live) - 1:+.1%}")


if __name__ == "__main__":
    main()
