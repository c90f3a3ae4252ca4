"""What the part `services` is worth on simulated distillation from nine teachers, on seeds that nothing was tuned on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest

from bench.workloads import Mopd, mopd
from scheduler.policies import make_policy
from scheduler.sim.cluster import Cluster
from scheduler.sim.simulate import Simulation

pytestmark = pytest.mark.long

SEED = 77


@dataclass(frozen=True)
class Figures:
    mean_act_s: float
    restores: int


@cache
def simulated(
    policy: str, batch: int, cluster: tuple[int, int], *, seed: int = SEED, without: str = "", memory_mb: int = 60_000
) -> Figures:
    drawn = mopd(batch, seed, Mopd(memory_mb=memory_mb))
    parts = [without] if without else []
    nodes, gpus = cluster
    ended = Simulation(drawn, make_policy(policy, without=parts), Cluster(nodes=nodes, cores=0, gpus=gpus)).run()
    assert all(record.status == "succeeded" for record in ended.actions)
    mean_act_s = sum(record.act_s for record in ended.actions) / len(ended.actions)
    return Figures(mean_act_s, ended.restores)


@pytest.mark.parametrize("cluster", [(1, 24), (3, 12)])
def test_half_the_restores_of_the_published_algorithm_and_two_fifths_off_its_act(cluster: tuple[int, int]) -> None:
    ours, paper = simulated("elastic", 2048, cluster), simulated("paper", 2048, cluster)
    assert ours.restores <= 0.5 * paper.restores
    assert ours.mean_act_s <= 0.6 * paper.mean_act_s


def test_ten_times_as_fast_as_equal_shares_on_as_many_cells() -> None:
    ours, static = simulated("elastic", 2048, (1, 36)), simulated("static:4", 2048, (1, 36))
    assert ours.mean_act_s <= static.mean_act_s / 10


def test_no_slower_than_without_the_part_where_there_is_little_to_do() -> None:
    ours = [simulated("elastic", 204, (1, 8), seed=seed) for seed in (SEED, 78, 79)]
    without = [simulated("elastic", 204, (1, 8), seed=seed, without="services") for seed in (SEED, 78, 79)]
    assert sum(one.mean_act_s for one in ours) <= sum(one.mean_act_s for one in without)
    assert sum(one.restores for one in ours) < sum(one.restores for one in without)


@pytest.mark.parametrize(("batch", "cells", "most"), [(204, 8, 0.6), (1024, 16, 0.75)])
def test_several_services_on_a_gpu_are_worth_the_more_the_less_there_is_to_do(batch: int, cells: int, most: float) -> None:
    # Given teachers of which five fit onto a GPU
    shared = [simulated("elastic", batch, (1, cells), seed=seed, memory_mb=16_000) for seed in (SEED, 78)]
    alone = [simulated("elastic", batch, (1, cells), seed=seed, memory_mb=16_000, without="sharing") for seed in (SEED, 78)]
    assert sum(one.mean_act_s for one in shared) <= most * sum(one.mean_act_s for one in alone)
    assert sum(one.restores for one in shared) <= 0.3 * sum(one.restores for one in alone)


def test_the_part_is_what_makes_the_difference() -> None:
    whole, without = simulated("elastic", 2048, (1, 24)), simulated("elastic", 2048, (1, 24), without="services")
    assert whole.mean_act_s <= 0.5 * without.mean_act_s
    assert whole.restores <= 0.5 * without.restores
