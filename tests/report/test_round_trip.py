"""A live run, exported and simulated, comes near to the run itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.replay.traces import read_trace, write_trace
from tests.report.round_trip import BUNDLED, round_trip, waiting, without_overhead

pytestmark = pytest.mark.timeout(600)

STEP_ERROR, ACT_ERROR = 0.15, 0.25
"""What the step and the mean ACT (without overhead) of a simulation may differ by from the live run."""


def test_a_simulation_of_an_exported_run_is_near_to_the_run(tmp_path: Path) -> None:
    # Given the bundled rollouts, whose commands wait instead of computing, so that a busy machine does not slow them down
    path = tmp_path / "waiting.jsonl"
    trace = waiting(read_trace(BUNDLED))
    with path.open("w") as stream:
        write_trace(trace, stream)
    # When they have run live, are exported and simulated
    live, simulated = round_trip(tmp_path, path, "fcfs")
    # Then the trace has the steps of the original, each with its parallel actions
    exported = {one.trajectory: one for one in read_trace(tmp_path / "exported.jsonl").trajectories}
    for original in trace.trajectories:
        steps = [sorted(action.kind for action in step.actions) for step in original.steps]
        assert [sorted(action.kind for action in step.actions) for step in exported[original.trajectory].steps] == steps
    # And the simulation takes as long as the run, but for the overhead of the steps of a trajectory, of which it knows nothing
    overhead_s = live["mean_overhead"] * max(len(one.steps) for one in trace.trajectories)
    assert (simulated["actions"], simulated["failed"]) == (live["actions"], live["failed"]) == (89, 0)
    assert simulated["step_duration"] == pytest.approx(live["step_duration"], abs=STEP_ERROR * live["step_duration"] + overhead_s)
    assert without_overhead(simulated) == pytest.approx(without_overhead(live), rel=ACT_ERROR)
