"""Exports: what the journal keeps of a run, as a trace."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from app.replay.traces import read_trace
from scheduler.sim.trace import Trace
from tests.cli.forked import forked
from tests.report.scene import ZERO, Scene


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def exported(folder: Path, *words: str, **variables: str) -> tuple[Trace, str]:
    """Export and read what was written, with what was said."""
    done = forked("export", *words, "-o", "out.jsonl", cwd=folder, **variables)
    assert done.returncode == 0, done.stderr
    return read_trace(folder / "out.jsonl"), done.stderr


def test_think_times_and_arrivals_are_those_of_the_trainer(scene: Scene, tmp_path: Path) -> None:
    # Given two trajectories, of which the second one comes 3 s later and waits 2 s for its environment
    scene.opening(0.0, 0.0, 0.5)
    scene.action(1.0, 1.5, 2.5)
    scene.action(4.5, 4.5, 5.0)
    scene.opening(3.0, 5.0, 5.25, environment="e2", trajectory="t2", memory_mb=1024)
    scene.action(6.0, 6.0, 7.0, environment="e2", trajectory="t2")
    trace, _ = exported(tmp_path, "coding")
    first, second = trace.trajectories
    assert (first.arrival_s, second.arrival_s) == (0.0, 3.0)
    assert [step.think_s for step in first.steps] == [0.5, 2.0]
    assert [step.think_s for step in second.steps] == [0.75]
    assert (first.memory_mb, second.memory_mb) == (512, 1024)
    assert [action.work_s for action in first.actions()] == [1.0, 0.5]


def test_actions_that_overlap_are_one_step_and_commands_of_one_session_are_not(scene: Scene, tmp_path: Path) -> None:
    # Given three actions at once, two of them commands of one session, and one after them all
    scene.action(0.0, 0.0, 2.0)
    scene.action(0.0, 2.0, 3.0)
    scene.action(0.01, 0.01, 1.0, kind="cpu.read_file", cost={}, cores=())
    scene.action(5.0, 5.0, 6.0, session="main")
    trace, said = exported(tmp_path, "coding")
    steps = trace.trajectories[0].steps
    assert [sorted(action.kind for action in step.actions) for step in steps] == [["cpu.exec"], ["cpu.exec", "cpu.read_file"], ["cpu.exec"]]
    assert [step.think_s for step in steps] == [0.0, 0.0, 2.0]
    assert "overlapped" not in said


def test_an_action_overlaps_what_is_submitted_until_its_worker_is_done(scene: Scene, tmp_path: Path) -> None:
    # Given an action that took 0.5 s to the scheduler, 0.5 s to the worker, and then ran 1 s; its end was noted 0.5 s later
    on_the_way = {"queue_s": 0.0, "overhead_s": 1.5, "execution_s": 1.0, "started_at": ZERO + 1.0}
    scene.action(0.0, 0.5, 2.5, **on_the_way)
    # When others are submitted before it was done, and after that
    scene.action(1.9, 1.9, 2.25, session="other")
    scene.action(2.3, 2.3, 3.0, session="third")
    trace, _ = exported(tmp_path, "coding")
    steps = trace.trajectories[0].steps
    assert [(len(step.actions), step.think_s) for step in steps] == [(2, 0.0), (1, 0.05)]


def test_a_request_to_a_server_keeps_its_kind_and_its_core(scene: Scene, tmp_path: Path) -> None:
    scene.action(0.0, 0.0, 2.0, kind="cpu.request", cores=(0,), cost={"cores": [1]})
    trace, _ = exported(tmp_path, "coding")
    (action,) = trace.actions()
    assert (action.kind, action.work_s, action.elasticity.units, action.cpu_s) == ("cpu.request", 2.0, (1,), None)


def test_memory_is_what_was_measured_and_the_limit_what_was_declared(scene: Scene, tmp_path: Path) -> None:
    scene.opening(0.0, 0.0, 0.5, memory_mb=2048)
    scene.action(1.0, 1.0, 2.0, memory_mb=300, resident_mb=40)
    scene.action(3.0, 3.0, 4.0)
    trace, _ = exported(tmp_path, "coding")
    assert trace.trajectories[0].memory_mb == 2048
    assert [(action.memory_mb, action.resident_mb) for action in trace.actions()] == [(300, 40), (None, None)]


def test_actions_of_several_sessions_run_together(scene: Scene, tmp_path: Path) -> None:
    scene.action(0.0, 0.0, 9.0, session="server")
    scene.action(4.0, 4.0, 5.0, session="main")
    trace, said = exported(tmp_path, "coding")
    assert [len(step.actions) for step in trace.trajectories[0].steps] == [2]
    assert "in 1 steps actions overlapped that were submitted one after another" in said


def test_work_is_what_one_unit_would_take(scene: Scene, tmp_path: Path) -> None:
    # Given a command that ran 2 s on four cores, and declares that nine tenths of it are parallel
    scene.action(0.0, 0.0, 2.0, cores=(0, 1, 2, 3), cost={"cores": [1, 2, 4]}, parallel_fraction=0.9, cpu_s=5.5, timeout_s=60, priority=7)
    # And one that lost half of its two cores half way
    scene.action(3.0, 3.0, 5.0, cores=(0, 1), cost={"cores": [1, 2]}, parallel_fraction=1.0, resized=(4.0, (0,)), unit_s=3.0, priority=7)
    trace, _ = exported(tmp_path, "coding")
    first, second = trace.actions()
    assert first.work_s == pytest.approx(2.0 / (0.1 + 0.9 / 4), abs=1e-3)
    assert (first.elasticity.units, first.observed_s, first.cpu_s, first.timeout_s) == ((1, 2, 4), 2.0, 5.5, 60)
    assert second.work_s == pytest.approx(2.0 * 1.5)
    assert trace.trajectories[0].priority == 7 and first.priority is None


def test_a_name_that_opens_again_is_another_trajectory(scene: Scene, tmp_path: Path) -> None:
    for at in (0.0, 100.0):
        scene.opening(at, at, at + 0.5, environment=f"e{at}")
        scene.action(at + 1, at + 1, at + 2, environment=f"e{at}")
        scene.closing(at + 3, at + 3.5, environment=f"e{at}")
    trace, _ = exported(tmp_path, "coding")
    assert [(one.trajectory, one.arrival_s) for one in trace.trajectories] == [("t1", 0.0), ("t1#2", 100.0)]


def test_services_and_quotas_make_the_trace_replay(scene: Scene, tmp_path: Path) -> None:
    # Given calls of a service that its node describes and of two quotas, of which one is declared
    scene.node("g1", cells=2, services={"judge": {"cells": [1, 2], "memory_mb": 900, "restore_s": 0.25, "max_concurrency": 3}})
    on_gpu = {"kind": "gpu.score", "service": "judge", "environment": None, "cost": {"cells": [1, 2]}}
    scene.action(0.0, 0.0, 1.0, cores=(), cells=(0,), node="g1", **on_gpu)
    for at in (0.0, 0.1, 0.2, 5.0):
        call = {"kind": "api.call", "environment": None, "trajectory": f"c{at}"}
        scene.action(at, at, at + 0.15, cores=(), cost={"quota:search": [1]}, **call)
        scene.action(at, at, at + 0.15, cores=(), cost={"quota:maps": [1], "tokens:maps": [70]}, **{**call, "trajectory": f"m{at}"})
    (tmp_path / "services.toml").write_text("[quotas.maps]\nrate_per_s = 7\nconcurrency = 9\n")
    trace, said = exported(tmp_path, "coding", TANGRAM_SERVICES_FILE=str(tmp_path / "services.toml"))
    # Then the header has them; of the quota that nobody declares, what was seen
    judge = trace.services["judge"]
    assert (judge.cells, judge.memory_mb, judge.restore_s, judge.max_concurrency) == ((1, 2), 900, 0.25, 3)
    assert (trace.quotas["maps"].rate_per_s, trace.quotas["maps"].concurrency) == (7.0, 9)
    assert (trace.quotas["search"].rate_per_s, trace.quotas["search"].concurrency) == (3.0, 2)
    assert "the limits of search are not known here" in said
    assert {action.tokens for action in trace.actions() if action.quota == "maps"} == {70}
    replayed = forked("replay", "out.jsonl", "--simulate", "--cores", "2", "--json", cwd=tmp_path)
    assert json.loads(replayed.stdout)["actions"] == 9, replayed.stderr


def test_what_was_not_carried_out_is_left_out_and_said(scene: Scene, tmp_path: Path) -> None:
    scene.action(0.0, 0.0, 1.0)
    scene.action(2.0, None, 3.0, status="cancelled")
    scene.action(4.0, 4.0, 5.0, kind="cpu.snapshot", cost={}, cores=())
    scene.action(6.0, 6.0, 7.0, status="timed_out")
    trace, said = exported(tmp_path, "coding")
    assert [step.think_s for step in trace.trajectories[0].steps] == [0.0, 5.0]
    assert "left out, their time counted as thinking: 1 cancelled, 1 cpu.snapshot" in said


def test_a_celery_task_of_ones_own_is_known_by_what_it_asks_for(scene: Scene, tmp_path: Path) -> None:
    scene.action(0.0, 0.0, 1.0, kind="my.build", environment=None, trajectory=None, cost={"cores": [1, 2]}, id="first")
    scene.action(2.0, 2.0, 3.0, kind="my.build", environment=None, trajectory=None, cost={"cores": [1, 2]}, id="second")
    trace, _ = exported(tmp_path, "coding")
    assert [(one.trajectory, one.steps[0].actions[0].kind, one.steps[0].actions[0].action_class) for one in trace.trajectories] == [
        ("first", "cpu.exec", "my.build"), ("second", "cpu.exec", "my.build"),
    ]  # fmt: skip


def test_what_a_command_said_is_not_in_the_trace(scene: Scene, tmp_path: Path) -> None:
    scene.action(0.0, 0.0, 1.0, message=json.dumps({"command": "echo hunter2"}))
    exported(tmp_path, "coding")
    assert "hunter2" not in (tmp_path / "out.jsonl").read_text()


def test_a_run_of_another_journal_is_named_by_its_path(scene: Scene, tmp_path: Path) -> None:
    scene.action(1.0, 1.0, 2.0)
    run = scene.run()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for words in (f"{scene.path}:last", f"{scene.path}:{run}", f"{scene.path}:coding"):
        trace, _ = exported(elsewhere, words)
        assert len(trace.trajectories) == 1


def refused(*words: str, cwd: Path) -> subprocess.CompletedProcess[Any]:
    done = forked(*words, cwd=cwd)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    return done


def test_nothing_to_export_is_said(scene: Scene, tmp_path: Path) -> None:
    scene.action(0.0, None, 1.0, status="rejected")
    assert "carried out" in refused("export", "coding", cwd=tmp_path).stderr
    assert "no run and no job 'nobody'" in refused("export", "nobody", cwd=tmp_path).stderr
    assert "no run and no job 'nobody'" in refused("export", f"{scene.path}:nobody", cwd=tmp_path).stderr
