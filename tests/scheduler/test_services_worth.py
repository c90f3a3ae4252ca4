"""What the plan is worth on simulated distillation from nine teachers, on seeds that nothing was tuned on."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from bench.workloads import Mopd, mopd
from scheduler.policies import make_policy
from scheduler.simulate import Cluster, Simulation
from scheduler.stats import percentile

SEED = 77


@dataclass(frozen=True)
class Figures:
    mean_act_s: float
    restores: int
    decision_us_p99: float


def simulated(policy: str, batch: int, cluster: tuple[int, int], *, concurrency: int = 1, seed: int = SEED, without: str = "") -> Figures:
    drawn = mopd(batch, seed, Mopd())
    services = {name: replace(spec, max_concurrency=concurrency) for name, spec in drawn.services.items()}
    parts = [without] if without else []
    nodes, gpus = cluster
    run = Simulation(replace(drawn, services=services), make_policy(policy, without=parts), Cluster(nodes=nodes, cores=0, gpus=gpus)).run()
    assert all(record.status == "succeeded" for record in run.actions)
    mean_act_s = sum(record.act_s for record in run.actions) / len(run.actions)
    return Figures(mean_act_s, run.restores, percentile(sorted(run.decision_us), 99.0))


@pytest.mark.parametrize("cluster", [(1, 24), (3, 8), (2, 12), (1, 36), (3, 12)])
def test_half_the_restores_of_the_published_algorithm_and_two_fifths_off_its_act(cluster: tuple[int, int]) -> None:
    ours, paper = simulated("elastic", 2048, cluster), simulated("paper", 2048, cluster)

    assert ours.restores <= 0.5 * paper.restores
    assert ours.mean_act_s <= 0.6 * paper.mean_act_s


def test_ten_times_as_fast_as_equal_shares_on_as_many_cells() -> None:
    ours, static = simulated("elastic", 2048, (1, 36)), simulated("static:4", 2048, (1, 36))

    assert ours.mean_act_s <= static.mean_act_s / 10


def test_several_times_as_fast_where_instances_run_several_actions() -> None:
    ours = [simulated("elastic", 2048, (1, 9), concurrency=4, seed=seed) for seed in (SEED, 78, 79)]
    static = [simulated("static:4", 2048, (1, 9), concurrency=4, seed=seed) for seed in (SEED, 78, 79)]

    assert sum(one.mean_act_s for one in ours) <= sum(one.mean_act_s for one in static) / 4


def test_the_part_is_what_makes_the_difference() -> None:
    whole, without = simulated("elastic", 2048, (1, 24)), simulated("elastic", 2048, (1, 24), without="services")

    assert whole.mean_act_s <= 0.5 * without.mean_act_s
    assert whole.restores <= 0.5 * without.restores


def test_a_decision_takes_milliseconds_at_most() -> None:
    # Given the most actions that wait in these runs
    figures = [simulated("elastic", 2048, (1, 24), seed=seed) for seed in (SEED, 78, 79)]

    # Then the best of three runs, whatever else the machine does, stays within the aim
    assert min(each.decision_us_p99 for each in figures) < 5_000
