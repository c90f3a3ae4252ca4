"""What a live run is compared with: the trace that is made of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.planning.calibration import FILE, compared, read_calibration, recorded
from app.replay.replay_command import ReplayOptions, simulate
from app.replay.trace_lines import TraceError
from app.replay.traces import BUNDLED, read_trace
from scheduler.sim.summary import summarise


@pytest.mark.parametrize("policy", ["static:1", "fixed:2"])
def test_a_run_whose_grants_never_change_is_simulated_without_any_error(policy: str) -> None:
    trace = read_trace(BUNDLED)
    options = ReplayOptions(policy=policy, cores=3, gpus=2, speed=4.0)
    run = simulate(trace, options)
    again = simulate(recorded(trace, run), options)
    assert summarise(again)["mean_act"] == pytest.approx(summarise(run)["mean_act"])
    assert summarise(again)["step_duration"] == pytest.approx(summarise(run)["step_duration"])
    assert compared(trace, run, options)["error"] == pytest.approx({"mean_act": 0, "p95_act": 0, "step_duration": 0}, abs=1e-9)


def test_a_calibration_that_cannot_be_understood_is_told(tmp_path: Path) -> None:
    assert read_calibration(tmp_path) is None
    (tmp_path / FILE).write_text('{"at": 1.0, "others_cores": 0.0, "cores": 2}')
    with pytest.raises(TraceError, match=r"policies: is missing"):
        read_calibration(tmp_path)
