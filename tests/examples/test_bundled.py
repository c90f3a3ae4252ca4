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


def test_there_are_at_least_six_scripts() -> None:
    assert len(SCRIPTS) >= 6


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


def test_some_trajectories_call_tools_in_parallel_and_search() -> None:
    parallel = [each for each in TRACE.trajectories if any(len(step.actions) > 1 for step in each.steps)]
    searching = [each for each in TRACE.trajectories if any(action.quota == "search" for action in each.actions())]

    assert len(parallel) >= 2
    assert len(searching) >= 2


@pytest.mark.parametrize("name", ["fix-wrap", "rename-figures"])
def test_a_bundled_script_runs_as_it_says(name: str, tmp_path: Path) -> None:
    script = read_script(EXAMPLES / "scripts" / f"{name}.toml")

    trajectory = record(script, SubprocessExecutor(tmp_path), EXAMPLES)

    assert trajectory.extra["files"] == "repo"
    assert all(action.observed_s for action in trajectory.actions() if action.kind == "cpu.exec")


def test_the_repository_is_sound_on_any_number_of_processes(tmp_path: Path) -> None:
    # Given the repository as an environment starts with it
    executor = SubprocessExecutor(tmp_path)
    for path, content in starting_files(EXAMPLES / "repo"):
        executor.upload(path, content)

    # When its corpus is indexed and its tests run on one and on three processes
    made = executor.exec("python3 -m textkit.synth --documents 30 --words 200 corpus", units=1, timeout_s=60)
    index = "python3 -m textkit.index --jobs $TANGRAM_DOP corpus shards$TANGRAM_DOP"
    indexed = [executor.exec(index, units=units, timeout_s=60) for units in (1, 3)]
    tested = executor.exec("python3 runtests.py", units=3, timeout_s=60)
    compared = executor.exec("diff -r shards1 shards3", units=1, timeout_s=60)

    # Then all is well and the same
    assert [each.exit_code for each in (made, *indexed, tested, compared)] == [0] * 5
    assert tested.output.endswith("tests, 0 failed\n")


def test_the_tests_of_the_repository_can_fail(tmp_path: Path) -> None:
    executor = SubprocessExecutor(tmp_path)
    for path, content in starting_files(EXAMPLES / "repo"):
        executor.upload(path, content)
    executor.upload("textkit/slug.py", b"raise RuntimeError('broken')\n")

    tested = executor.exec("python3 runtests.py test_slug", units=2, timeout_s=60)

    assert tested.exit_code == 1
    assert "broken" in tested.output
