"""The live comparison: every system gets the same work, and the verdict follows from the figures."""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from bench.live import FOR_A_TRACE, Refused, chosen_systems, main
from bench.live_compare import CLEARLY_AHEAD, Goal, compare, text
from bench.live_record import Act, Replayed
from bench.live_trace import OF_FILE, Workload, add_options, words, workload_of

ROOT = Path(__file__).resolve().parents[2]


def replayed(system: str, mean_act: float, step_duration: float, failed: int = 0) -> Replayed:
    acts = [Act(act_s=mean_act, execution_s=0.1, cpu_s=0.1, succeeded=number >= failed) for number in range(4)]
    return Replayed.of(system, acts, step_duration, 1.0)


def test_the_workload_keeps_what_runs_on_cores_and_all_think_time() -> None:
    # Given as many trajectories as are bundled, each once
    trace = Workload(trajectories=7).trace()
    # When they are looked at; then all actions run on cores, and a step without any has left its thinking behind
    assert {action.kind.partition(".")[0] for action in trace.actions()} == {"cpu"}
    assert all(step.actions for trajectory in trace.trajectories for step in trajectory.steps)
    survey = next(each for each in trace.trajectories if each.trajectory == "survey-corpus")
    assert survey.steps[0].think_s == pytest.approx(2.9 + 6.1)
    assert len({trajectory.priority for trajectory in trace.trajectories}) == 1


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A trace of five rollouts without commands; some of their actions wait for half of their time."""
    step = '{"think_s": 2.0, "action": {"kind": "cpu.exec", "work_s": 0.4, "cpu_s": 0.2}}, {"action": {"kind": "cpu.exec", "work_s": 0.2}}'
    head = '{"schema": "tangram.trace/1", "services": {"judge": {}}}'
    lines = [f'{{"schema": "tangram.trace/1", "trajectory": "t{number}", "steps": [{step}]}}' for number in range(5)]
    judged = '{"think_s": 1.0, "action": {"kind": "gpu.score", "service": "judge", "work_s": 1.0}}'
    lines.append(f'{{"schema": "tangram.trace/1", "trajectory": "judged", "steps": [{judged}]}}')
    path = tmp_path / "rollouts.jsonl"
    path.write_text("\n".join([head, *lines]), encoding="utf-8")
    return path


def test_rollouts_of_a_trace_are_drawn_by_the_seed_and_scaled_as_a_whole(recorded: Path) -> None:
    # Given a trace; when two of its rollouts are replayed in half the time
    workload = replace(OF_FILE, file=recorded, trajectories=2, scale=0.5, spread_s=4.0, seed=1)
    trace = workload.trace()
    # Then work, CPU time, thinking and arrivals are half as long
    assert {(action.work_s, action.cpu_s) for action in trace.actions()} == {(0.2, 0.1), (0.1, None)}
    assert {step.think_s for trajectory in trace.trajectories for step in trajectory.steps} == {1.0, 0.0}
    assert all(trajectory.arrival_s <= 2.0 for trajectory in trace.trajectories)
    # And other seeds draw others, but none that has nothing to do on cores
    drawn = [frozenset(each.trajectory for each in replace(workload, seed=seed).trace().trajectories) for seed in range(20)]
    assert len(set(drawn)) > 1 and all(len(names) == 2 and "judged" not in names for names in drawn)
    # And what a child process is told is the same workload
    parser = argparse.ArgumentParser()
    add_options(parser)
    assert workload_of(parser.parse_args(words(workload))) == workload


def test_elastic_is_first_only_with_both_medians() -> None:
    # Given rounds in which another system is once, but not in the median, ahead
    rounds = [
        [replayed("elastic", 1.0, 10.0), replayed("fixed:1", 2.0, 11.0)],
        [replayed("fixed:1", 0.5, 9.0), replayed("elastic", 1.0, 10.0)],
        [replayed("elastic", 1.0, 10.0), replayed("fixed:1", 2.0, 12.0)],
    ]
    # When they are compared; then elastic is first, with the ratios of the medians
    document = compare(rounds)
    assert document["first"] is True
    assert document["systems"]["fixed:1"]["ratio"] == {"mean_act": 2.0, "step_duration": pytest.approx(1.1)}
    assert "fixed:1" in text(document) and "elastic is first in both" in text(document)
    # When the other is ahead in one figure; then it is not
    assert compare([[replayed("elastic", 1.0, 10.0), replayed("ray:1", 2.0, 9.0)]])["first"] is False
    # Nor is anybody where an action has failed
    assert compare([[replayed("elastic", 1.0, 10.0, failed=1), replayed("fixed:1", 2.0, 11.0)]])["first"] is False


def test_a_goal_bounds_both_figures_as_multiples_of_each_other_system() -> None:
    # Given elastic with two thirds of the other's mean ACT, and a step that is 2 % longer in the median
    rounds = [[replayed("elastic", 1.0, step), replayed("fcfs", 1.5, 10.0)] for step in (10.2, 9.0, 11.0)]
    # When the goal is 0.75 and 1.03; then it is met, though elastic is not first
    document = compare(rounds, CLEARLY_AHEAD)
    assert document["goal"]["met"] is True and document["first"] is False
    assert document["systems"]["fcfs"]["ours"]["step_duration"] == {"median": 1.02, "least": 0.9, "most": 1.1}
    assert "elastic ÷ fcfs: mean ACT 0.667 (0.667–0.667), step duration 1.020 (0.900–1.100)" in text(document)
    assert "is met" in text(document)
    # When it is to be half of the other's mean ACT; then it is not met
    assert compare(rounds, Goal(mean_act=0.5))["goal"]["met"] is False


def test_the_usual_systems_are_those_that_the_machine_can_tell_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given Ray; when nothing is chosen; then no amount is above the cores
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert chosen_systems("", 2) == ["elastic", "fixed:1", "fixed:2", "ray:1", "ray:2"]
    assert chosen_systems(",".join(FOR_A_TRACE), 2) == ["elastic", "fcfs", "fixed:1", "ray:1"]
    assert chosen_systems("fixed:4", 2) == ["elastic", "fixed:4"]
    # Given no Ray; when it is wanted; then one line says what to do
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Refused, match="compare"):
        chosen_systems("ray:1", 2)


@pytest.mark.parametrize("arguments", [["--policies", "ray:x"], ["--policies", "best"], ["--rounds", "0"], ["--pace", "nan"]])
def test_bad_words_end_with_code_2_and_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, *([] if "--policies" in arguments else ["--policies", "fixed:1"])]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1
