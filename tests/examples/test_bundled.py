"""The bundled scripts and the trace recorded from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from app.replay.recorder import record
from app.replay.scripts import read_script, starting_files
from app.replay.traces import read_trace
from examples.subprocess_executor import SubprocessExecutor
from scheduler.sim.trace import TraceAction, Trajectory

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPTS = sorted((EXAMPLES / "scripts").glob("*.toml"))
TRACE = read_trace(EXAMPLES / "rollouts.jsonl")
MOST_CORE_SECONDS = 12.0


def untimed(trajectory: Trajectory) -> Trajectory:
    def strip(action: TraceAction) -> TraceAction:
        return replace(action, work_s=0.0, cpu_s=None, observed_s=None)

    steps = tuple(replace(step, actions=tuple(map(strip, step.actions))) for step in trajectory.steps)
    extra = {key: value for key, value in trajectory.extra.items() if key != "files"}
    return replace(trajectory, steps=steps, extra=extra)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_the_bundled_trace_is_what_the_scripts_say(path: Path) -> None:
    script = read_script(path)
    (recorded,) = [each for each in TRACE.trajectories if each.trajectory == script.trajectory.trajectory]
    assert untimed(recorded) == untimed(script.trajectory)
    assert script.header.services.items() <= TRACE.services.items()
    assert script.header.quotas.items() <= TRACE.quotas.items()


@pytest.mark.parametrize("trajectory", TRACE.trajectories, ids=lambda each: each.trajectory)
def test_every_bundled_trajectory_is_fit_for_a_live_replay(trajectory: Trajectory) -> None:
    # Its starting files are beside the trace
    assert dict(starting_files(EXAMPLES / str(trajectory.extra["files"])))
    # It ends with a test run as reward, then a score
    *_, tests, score = [action for step in trajectory.steps for action in step.actions if action.kind != "gpu.logprobs"]
    assert (tests.action_class, score.kind, score.service) == ("test-suite", "gpu.score", "rm-small")
    # Something in it profits from several cores
    assert any(len(action.elasticity.units) > 1 for action in trajectory.actions() if action.kind == "cpu.exec")
    # Nothing takes for ever
    assert sum(action.work_s for action in trajectory.actions()) <= MOST_CORE_SECONDS


@pytest.mark.long
def test_a_bundled_script_runs_as_it_says(tmp_path: Path) -> None:
    # Given a script whose build and whose tests fail at first, and which ends with the whole test suite of the repository
    script = read_script(EXAMPLES / "scripts" / "rename-figures.toml")
    trajectory = record(script, SubprocessExecutor(tmp_path), EXAMPLES)
    assert trajectory.extra["files"] == "repo"
    assert all(action.observed_s for action in trajectory.actions() if action.kind == "cpu.exec")
