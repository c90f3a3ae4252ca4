"""`tangram replay --simulate` from outside, on the bundled rollouts."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.forked import forked

ROOT = Path(__file__).resolve().parents[2]
BUNDLED = ROOT / "examples" / "rollouts.jsonl"
SHARED = ROOT.parent / "shared" / "rollouts" / "agentcgroup.jsonl"
MEASURED = ("decision_us_p50", "decision_us_p99")


def replay(trace: Path, *words: str) -> dict[str, Any]:
    done = forked("replay", str(trace), "--simulate", "--json", *words, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def in_a_process_of_its_own(hash_seed: int, trace: Path, *words: str) -> dict[str, Any]:
    """Replay where sets have the order of another hash seed than here."""
    argv = [sys.executable, "-m", "tangram", "replay", str(trace), "--simulate", "--json", *words]
    env = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    document: dict[str, Any] = json.loads(subprocess.run(argv, env=env, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    return document


def without_measured(document: dict[str, Any]) -> str:
    return json.dumps({key: value for key, value in document.items() if key not in MEASURED})


@pytest.mark.parametrize("policy", ["elastic", "paper", "fcfs", "fixed:2", "static:1"])
def test_the_same_seed_gives_the_same_document_and_every_action_ends(policy: str) -> None:
    words = ("--policy", policy, "--tile", "14", "--cores", "3", "--gpus", "2", "--seed", "3")
    first, second = replay(BUNDLED, *words), in_a_process_of_its_own(len(policy), BUNDLED, *words)
    assert without_measured(first) == without_measured(second)
    assert (first["trajectories"], first["failed"]) == (14, 0)
    parts = first["mean_queue"] + first["mean_execution"] + first["mean_overhead"]
    assert first["mean_act"] == pytest.approx(parts)


def test_another_seed_gives_another_document() -> None:
    words = ("--tile", "14", "--cores", "3", "--gpus", "2")
    assert replay(BUNDLED, *words, "--seed", "1")["mean_act"] != replay(BUNDLED, *words, "--seed", "2")["mean_act"]


def test_the_floor_belongs_to_the_trace_and_not_to_the_policy() -> None:
    words = ("--tile", "7", "--cores", "3", "--gpus", "2")
    floors = {replay(BUNDLED, *words, "--policy", policy)["floor_act"] for policy in ("elastic", "static:1")}
    assert len(floors) == 1


def test_thinking_faster_shortens_the_step() -> None:
    words = ("--cores", "32", "--gpus", "2")
    assert replay(BUNDLED, *words, "--speed", "10")["step_duration"] < replay(BUNDLED, *words)["step_duration"] / 3


@pytest.mark.skipif(not SHARED.exists(), reason="the recorded rollouts of AgentCgroup are not at hand")
def test_a_quarter_of_the_cores_serves_real_rollouts_no_worse_than_a_core_each() -> None:
    elastic = replay(SHARED, "--tile", "64", "--cores", "16", "--policy", "elastic")
    static = replay(SHARED, "--tile", "64", "--cores", "64", "--policy", "static:1")
    assert elastic["failed"] == static["failed"] == 0
    assert elastic["mean_act"] <= static["mean_act"]
