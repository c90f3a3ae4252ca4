"""A live run is exported as the trace that it was, and simulated to the same actions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from app.replay.traces import BUNDLED, read_trace, write_trace
from bench.figures.simulation import waiting
from scheduler.sim.trace import Step, Trace
from tests.cli.forked import forked
from tests.cli.support import tangram

pytestmark = pytest.mark.real

FASTER = 20.0
MACHINE = ("--policy", "fcfs", "--cores", "2", "--gpus", "2", "--json")


def hastened(trace: Trace) -> Trace:
    """Return a trace whose actions take a part of their time, and come without pauses."""

    def fast(step: Step) -> Step:
        return replace(step, think_s=0.0, actions=tuple(replace(action, work_s=action.work_s / FASTER) for action in step.actions))

    return replace(trace, trajectories=tuple(replace(one, steps=tuple(map(fast, one.steps))) for one in trace.trajectories))


def test_a_live_run_is_exported_with_its_steps_and_simulated_to_the_same_actions(tmp_path: Path) -> None:
    # Given the bundled rollouts, whose commands wait instead of computing
    trace = hastened(waiting(read_trace(BUNDLED)))
    with (tmp_path / "waiting.jsonl").open("w") as stream:
        write_trace(trace, stream)
    ran = tangram(tmp_path, "replay", "waiting.jsonl", "--live", *MACHINE)
    assert ran.returncode == 0, ran.stderr
    live = json.loads(ran.stdout)
    assert forked("export", live["run"], "-o", "exported.jsonl", cwd=tmp_path).returncode == 0
    simulated = json.loads(forked("replay", "exported.jsonl", "--simulate", *MACHINE, cwd=tmp_path).stdout)
    # Then the trace has the steps of the original, each with its parallel actions
    exported = {one.trajectory: one for one in read_trace(tmp_path / "exported.jsonl").trajectories}
    for original in trace.trajectories:
        steps = [sorted(action.kind for action in step.actions) for step in original.steps]
        assert [sorted(action.kind for action in step.actions) for step in exported[original.trajectory].steps] == steps
    assert (simulated["actions"], simulated["failed"]) == (live["actions"], live["failed"]) == (89, 0)
