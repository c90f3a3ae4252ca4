"""What the parts `shares` and `learning` are worth where cores are short: floods, in simulation, and recorded rollouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.flood import Case, lightest_act_s
from tests.cli.forked import ROOT, forked

pytestmark = pytest.mark.long

SHARED = ROOT.parent / "shared" / "rollouts" / "agentcgroup.jsonl"


def replayed(trace: Path, *words: str) -> dict[str, Any]:
    done = forked("replay", str(trace), "--simulate", "--json", *words, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_a_flood_of_coding_rollouts_hardly_slows_down_the_lightest_job() -> None:
    # Given three jobs on 96 cores, the lightest of which runs builds and tests on many cores now and then
    case = Case(1, 96, (16, 24, 48), 200, 7)
    calm = lightest_act_s(case, 48)

    # When the third one has four times as many rollouts, then the lightest hardly feels it, which without shares it does
    assert lightest_act_s(case, case.flood) <= 1.1 * calm
    assert lightest_act_s(case, case.flood, without=("shares",)) > 2.0 * calm


@pytest.mark.skipif(not SHARED.exists(), reason="the recorded rollouts of AgentCgroup are not at hand")
def test_each_part_of_elastic_can_be_switched_off_and_learning_is_what_helps_most_on_few_cores() -> None:
    words = ("--tile", "128", "--cores", "10", "--spread", "10")
    whole = replayed(SHARED, *words)
    unlearned = replayed(SHARED, *words, "--without", "learning")
    assert whole["mean_act"] < 0.95 * unlearned["mean_act"]
    assert whole["prediction_factor_p50"] < unlearned["prediction_factor_p50"]


@pytest.mark.skipif(not SHARED.exists(), reason="the recorded rollouts of AgentCgroup are not at hand")
def test_real_rollouts_on_few_cores_are_far_better_off_than_under_the_published_algorithm() -> None:
    words = ("--tile", "64", "--cores", "4")
    elastic, paper = (replayed(SHARED, *words, "--policy", policy) for policy in ("elastic", "paper"))
    assert elastic["mean_act"] < 0.8 * paper["mean_act"]
