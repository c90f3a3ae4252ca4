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
POLICIES = ("elastic", "paper", "fcfs", "fixed:2", "static:1")
SAME_SEED = ("--tile", "9", "--cores", "3", "--gpus", "2", "--seed", "3")
REPLAYS = """
import sys
from app.cli import main
trace, *policies = sys.argv[1 : sys.argv.index("--")]
words = sys.argv[sys.argv.index("--") + 1 :]
for policy in policies:
    sys.argv = ["tangram", "replay", trace, "--simulate", "--json", "--policy", policy, *words]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
"""
MEASURED = ("decision_us_p50", "decision_us_p99")


def replay(trace: Path, *words: str) -> dict[str, Any]:
    done = forked("replay", str(trace), "--simulate", "--json", *words, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


@pytest.fixture(scope="module")
def elsewhere() -> dict[str, dict[str, Any]]:
    """Return the documents of the policies, replayed where sets have the order of another hash seed than here."""
    argv = [sys.executable, "-c", REPLAYS, str(BUNDLED), *POLICIES, "--", *SAME_SEED]
    env = {**os.environ, "PYTHONHASHSEED": "5"}
    printed = subprocess.run(argv, env=env, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    documents: dict[str, dict[str, Any]] = {}
    for policy in POLICIES:
        documents[policy], end = json.JSONDecoder().raw_decode(printed)
        printed = printed[end:].lstrip()
    # The floor belongs to the trace, and not to the policy.
    assert len({document["floor_act"] for document in documents.values()}) == 1
    return documents


def without_measured(document: dict[str, Any]) -> str:
    return json.dumps({key: value for key, value in document.items() if key not in MEASURED})


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_seed_gives_the_same_document_and_every_action_ends(policy: str, elsewhere: dict[str, dict[str, Any]]) -> None:
    first, second = replay(BUNDLED, "--policy", policy, *SAME_SEED), elsewhere[policy]
    assert first["policy"] == policy
    assert without_measured(first) == without_measured(second)
    assert (first["trajectories"], first["failed"]) == (9, 0)
    parts = first["mean_queue"] + first["mean_background"] + first["mean_execution"] + first["mean_overhead"]
    assert first["mean_act"] == pytest.approx(parts)


def test_another_seed_gives_another_document() -> None:
    words = ("--tile", "14", "--cores", "3", "--gpus", "2")
    assert replay(BUNDLED, *words, "--seed", "1")["mean_act"] != replay(BUNDLED, *words, "--seed", "2")["mean_act"]


def test_thinking_faster_shortens_the_step() -> None:
    words = ("--cores", "32", "--gpus", "2")
    assert replay(BUNDLED, *words, "--speed", "10")["step_duration"] < replay(BUNDLED, *words)["step_duration"] / 3
