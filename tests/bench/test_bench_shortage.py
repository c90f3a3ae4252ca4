"""The simulated comparison where resources are short: what its cases are, and that its figures are those of a replay."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.replay.traces import write_trace
from bench import paper
from bench.shortage import main
from bench.workloads import ai_coding
from scheduler.sim.trace import Trace

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of the first steps of seven rollouts."""
    path = tmp_path_factory.mktemp("shortage") / "rollouts.jsonl"
    with path.open("w", encoding="utf-8") as file:
        whole = ai_coding(7, 3).trajectories
        write_trace(Trace(trajectories=tuple(replace(each, steps=each.steps[:3]) for each in whole)), file)
    return path


def rows(capsys: pytest.CaptureFixture[str], *options: str) -> list[dict[str, Any]]:
    """Run the benchmark, and return the rows of its document."""
    assert main([*options, "--json"]) == 0
    return list(json.loads(capsys.readouterr().out)["rows"])


def test_a_case_of_recorded_rollouts_is_what_the_command_line_replays(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Given a case, simulated from a seed
    (row,) = rows(capsys, "--only", "rollouts-64-8", "--policies", "elastic", "--seeds", "5", "--trace", str(recorded))
    words = ["--simulate", "--tile", "64", "--speed", "10", "--spread", "20", "--nodes", "1", "--cores", "8", "--seed", "5", "--json"]
    argv = [sys.executable, "-m", "tangram", "replay", str(recorded), *words]
    document = json.loads(subprocess.run(argv, cwd=ROOT, check=True, capture_output=True).stdout)
    found = row["seeds"]["5"]
    assert all(found[key] == document[key] for key in ("actions", "failed", "mean_act", "p50_act", "p95_act", "p99_act", "step_duration"))
    assert found["resizes_per_action"] == document["resizes"] / document["actions"]


def test_figures_are_medians_with_a_range_and_ratios_to_elastic(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Given a case under two policies from three seeds
    options = ("--only", "rollouts-64-16", "--trace", str(recorded), "--seeds", "1,2,3")
    fcfs, ours = rows(capsys, *options)
    # Then each figure has its median and range, and each ratio is one of runs from the same seed
    acts = sorted(found["mean_act"] for found in fcfs["seeds"].values())
    assert fcfs["spreads"]["mean_act"] == {"median": acts[1], "least": acts[0], "most": acts[2]}
    ratios = sorted(fcfs["seeds"][seed]["mean_act"] / ours["seeds"][seed]["mean_act"] for seed in "123")
    assert fcfs["act_ratio"] == {"median": ratios[1], "least": ratios[0], "most": ratios[2]}
    assert (ours["act_ratio"]["median"], ours["step_ratio"]["median"]) == (1.0, 1.0)
    # When they are simulated two at a time; then the same comes out, but for times that are measured
    again = rows(capsys, *options, "--jobs", "2")
    assert [row["spreads"]["mean_act"] for row in again] == [row["spreads"]["mean_act"] for row in (fcfs, ours)]


@pytest.mark.parametrize(
    ("main", "options", "says"),
    [
        (main, ("--only", "nothing"), "--only: no case 'nothing'"),
        (main, ("--policies", "best"), "'best'"),
        (main, ("--policies", "fcfs", "--without", "shares"), "--without"),
        (main, ("--seeds", "1,1"), "--seeds"),
        (main, ("--trace", "/nowhere.jsonl"), "/nowhere.jsonl"),
        (paper.main, ("--only", "nothing"), "--only"),
        (paper.main, ("--processes", "0"), "--processes: must be at least 1, not 0"),
        (paper.main, ("--rollouts", "/nowhere.jsonl"), "/nowhere.jsonl"),
        (paper.main, ("--out", "/tmp"), "--out: must name a file"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(
    main: Callable[[tuple[str, ...]], int], options: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(options)
    except SystemExit as ended:
        code = int(ended.code or 0)
    captured = capsys.readouterr()
    assert code == 2 and captured.out == "" and says in captured.err and captured.err.count("\n") == 1
