"""Figures of live runs beside their simulation and their recording. Commands of the exported run wait instead of computing."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from app.replay.traces import BUNDLED, read_trace, write_trace
from bench import live
from bench.figures.registry import figure
from bench.live_trace import with_actions
from bench.tools import NotMeasured
from scheduler.sim.trace import Trace, TraceAction

MACHINE = ("--policy", "fcfs", "--cores", "2", "--gpus", "2", "--json")
ROLLOUTS, WORK_S, CPU_S = 5, 0.4, 0.2


@figure("%")
def simulated_step() -> float:
    """Return step of a simulation of the bundled rollouts, beyond that of the live run that it was exported from."""
    ran, simulated = _round_trip()
    return 100 * (simulated["step_duration"] / ran["step_duration"] - 1)


@figure("%")
def simulated_act() -> float:
    """Return mean ACT without overhead of that simulation, beyond those of the live run."""
    ran, simulated = (one["mean_act"] - one["mean_overhead"] for one in _round_trip())
    return 100 * (simulated / ran - 1)


@figure("%")
def calibrated_act() -> float:
    """Return mean ACT of a simulation under `elastic`, beyond that of the live run, as `tangram plan --calibrate` says."""
    return 100 * _calibration()["elastic"]["error"]["mean_act"]


@figure("%")
def calibrated_act_static() -> float:
    """Return mean ACT of a simulation under `static:1`, beyond that of the live run, as `tangram plan --calibrate` says."""
    return 100 * _calibration()["static:1"]["error"]["mean_act"]


@figure("×")
def replayed_cpu() -> float:
    """Return CPU time of a live replay of commands that wait for half of their time, over what was recorded."""
    step = [{"think_s": 1.0, "action": {"kind": "cpu.exec", "work_s": WORK_S, "cpu_s": CPU_S}}] * 2
    rows = [{"schema": "tangram.trace/1", "trajectory": f"t{number}", "steps": step} for number in range(ROLLOUTS)]
    printed = io.StringIO()
    with tempfile.TemporaryDirectory(prefix="tangram-figures-") as folder, contextlib.redirect_stdout(printed):
        path = Path(folder) / "rollouts.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        options = ["--take", str(ROLLOUTS), "--spread", "0", "--speed", "20", "--scale", "1", "--rounds", "1", "--policies", "fixed:1"]
        live.main(["--trace", str(path), *options, "--json"])
    found = json.loads(printed.getvalue())["systems"]["fixed:1"]
    return float(found["cpu_s"]["median"]) / (CPU_S * found["actions"])


def waiting(trace: Trace) -> Trace:
    """Return a trace whose commands only wait, in empty environments: how long they take does not depend on what else the machine does."""

    def wait(action: TraceAction) -> TraceAction:
        return replace(action, command=None, cpu_s=0.0, extra={}) if action.kind.startswith("cpu.") else action

    return replace(trace, trajectories=tuple(replace(with_actions(one, wait), extra={}) for one in trace.trajectories))


@cache
def _round_trip() -> tuple[dict[str, Any], dict[str, Any]]:
    """Replay the bundled rollouts live, export the run and simulate it; return what both came to."""
    with tempfile.TemporaryDirectory(prefix="tangram-figures-") as name:
        folder = Path(name)
        with (folder / "waiting.jsonl").open("w") as stream:
            write_trace(waiting(read_trace(BUNDLED)), stream)
        ran = json.loads(_tangram(folder, "replay", "waiting.jsonl", "--live", "--speed", "4", *MACHINE))
        _tangram(folder, "export", ran["run"], "-o", "exported.jsonl")
        return ran, json.loads(_tangram(folder, "replay", "exported.jsonl", "--simulate", *MACHINE))


@cache
def _calibration() -> dict[str, Any]:
    """Replay the bundled rollouts live under two policies, with their commands, and simulate them."""
    with tempfile.TemporaryDirectory(prefix="tangram-figures-") as folder:
        return dict(json.loads(_tangram(Path(folder), "plan", str(BUNDLED), "--calibrate", "--json"))["policies"])


def _tangram(folder: Path, *words: str) -> str:
    """Run the command line with its state in `folder`, and return what it prints."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("TANGRAM_")}
    variables |= {"TANGRAM_STATE_DIR": str(folder / "state"), "PYTHONPATH": str(BUNDLED.parents[1])}
    command = [sys.executable, "-m", "tangram", *words]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise NotMeasured(f"tangram {words[0]} ended with {done.returncode}: {done.stderr.strip()[-200:]}")
    return done.stdout
