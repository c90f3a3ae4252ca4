"""What the parts `shares` and `learning` are worth where cores are short: floods, in simulation, and recorded rollouts."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.flood import Case, lightest_act_s
from scheduler.policies import make_policy
from scheduler.sim.simulate import Cluster, Simulation
from scheduler.sim.summary import ReplayRecord, summarise
from scheduler.sim.trace import Step, Trace, TraceAction, Trajectory
from tangram.elasticity import Amdahl, Elasticity
from tests.cli.forked import ROOT, forked

pytestmark = pytest.mark.long

SHARED = ROOT.parent / "shared" / "rollouts" / "agentcgroup.jsonl"


def replayed(trace: Path, *words: str) -> dict[str, Any]:
    done = forked("replay", str(trace), "--simulate", "--json", *words, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def usual(name: str, count: int, draw: random.Random) -> list[Trajectory]:
    """Return rollouts of a coding job: mostly short commands, now and then an elastic build."""
    return [Trajectory(trajectory=f"{name}{n}", steps=steps_of(draw), job=name, arrival_s=draw.uniform(0, 30)) for n in range(count)]


def steps_of(draw: random.Random) -> tuple[Step, ...]:
    build = Elasticity(units=(1, 2, 4, 8), curve=Amdahl(0.9))
    steps = []
    for _ in range(draw.randint(10, 20)):
        if draw.random() < 0.2:
            one = TraceAction(kind="cpu.exec", work_s=draw.lognormvariate(math.log(8), 0.5), elasticity=build, action_class="build")
        else:
            one = TraceAction(kind="cpu.exec", work_s=draw.lognormvariate(0.0, 1.0), action_class="short")
        steps.append(Step(actions=(one,), think_s=draw.expovariate(1 / 4.7)))
    return tuple(steps)


def flood(count: int, work_s: float, draw: random.Random) -> list[Trajectory]:
    """Return rollouts that submit twenty commands at once, twice."""
    rollouts = []
    for number in range(count):
        step = Step(actions=tuple(TraceAction(kind="cpu.exec", work_s=draw.lognormvariate(math.log(work_s), 0.5)) for _ in range(20)))
        rollouts.append(Trajectory(trajectory=f"flood{number}", job="flood", arrival_s=draw.uniform(20, 40), steps=(step, step)))
    return rollouts


def replay(cores: int, light: int, flooding: Sequence[Trajectory] = (), *, without: Sequence[str] = ()) -> ReplayRecord:
    draw = random.Random(3)
    jobs = usual("light", light, draw) + usual("other", 3 * light, draw) + usual("third", 3 * light, draw)
    kept = [rollout for rollout in jobs if not flooding or rollout.job != "third"]
    return Simulation(Trace(trajectories=(*kept, *flooding)), make_policy("elastic", without=without), Cluster(cores=cores)).run()


def act_of(run: ReplayRecord, job: str) -> float:
    return float(summarise(run)["by_job"][job]["mean_act"])


def test_a_flood_of_one_job_does_not_slow_down_the_lightest() -> None:
    # Given three jobs of the same sort
    cores, light = 64, 8
    calm = act_of(replay(cores, light), "light")

    # When the third one floods the node instead, with many times its cores
    flooding = flood(60, 5.0, random.Random(4))
    run = replay(cores, light, flooding)

    # Then the lightest job hardly feels it, which without shares it does very much
    assert act_of(run, "light") <= 1.1 * calm
    assert act_of(replay(cores, light, flooding, without=["shares"]), "light") > 1.5 * calm
    # and the flood has its part of the node, all of it while it is alone
    assert all(record.status == "succeeded" for record in run.actions)
    assert throughput(run, "flood", 40.0, 80.0) >= cores / 3


def throughput(run: ReplayRecord, job: str, since: float, until: float) -> float:
    """Return the cores that a job has held on average between two times."""
    spans = [(max(since, r.ended_at - r.execution_s), min(until, r.ended_at), r.units) for r in run.actions if r.job == job]
    return sum(max(0.0, end - begin) * units for begin, end, units in spans) / (until - since)


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
