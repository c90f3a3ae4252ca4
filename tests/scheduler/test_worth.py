"""What parts of `elastic` are worth, simulated on seeds that nothing was tuned on: for distillation from nine teachers, and in a flood."""

from __future__ import annotations

from functools import cache

import pytest

from bench.flood import Case, lightest_act_s
from bench.workloads import Mopd, mopd
from scheduler.policies import make_policy
from scheduler.sim.cluster import Cluster
from scheduler.sim.simulate import Simulation

pytestmark = pytest.mark.long

SMALL_MB = 16_000
"""A teacher of which five fit onto a GPU."""


@cache
def simulated(
    policy: str, batch: int, cluster: tuple[int, int], *, seeds: range, without: str = "", memory_mb: int = 60_000
) -> list[float]:
    """Return the mean ACT and the number of restores, summed over seeds."""
    sums = [0.0, 0.0]
    for seed in seeds:
        drawn = mopd(batch, seed, Mopd(memory_mb=memory_mb))
        cells = Cluster(nodes=cluster[0], cores=0, gpus=cluster[1])
        ended = Simulation(drawn, make_policy(policy, without=[without] if without else []), cells).run()
        assert all(record.status == "succeeded" for record in ended.actions)
        sums[0] += sum(record.act_s for record in ended.actions) / len(ended.actions)
        sums[1] += ended.restores
    return sums


@pytest.mark.parametrize(
    ("other", "batch", "cluster", "seeds", "most_act", "most_restores"),
    [
        ({"policy": "paper"}, 2048, (1, 24), 1, 0.6, 0.5),
        ({"policy": "paper"}, 2048, (3, 12), 1, 0.6, 0.5),
        ({"policy": "static:4"}, 2048, (1, 36), 1, 0.1, None),
        ({"without": "services"}, 2048, (1, 24), 1, 0.5, 0.5),
        ({"without": "services"}, 204, (1, 8), 3, 1.0, 0.99),  # no slower where there is little to do
        ({"without": "sharing", "memory_mb": SMALL_MB}, 204, (1, 8), 2, 0.6, 0.3),
        ({"without": "sharing", "memory_mb": SMALL_MB}, 1024, (1, 16), 2, 0.75, 0.3),
    ],
)
def test_act_and_restores_are_at_most_these_parts_of_the_others(
    other: dict[str, str | int], batch: int, cluster: tuple[int, int], seeds: int, most_act: float, most_restores: float | None
) -> None:
    ours = {"memory_mb": other["memory_mb"]} if "memory_mb" in other else {}
    act_s, restores = simulated("elastic", batch, cluster, seeds=range(77, 77 + seeds), **ours)  # type: ignore[arg-type]
    theirs = simulated(**{"policy": "elastic", **other}, batch=batch, cluster=cluster, seeds=range(77, 77 + seeds))  # type: ignore[arg-type]
    assert act_s <= most_act * theirs[0]
    assert most_restores is None or restores <= most_restores * theirs[1]


def test_a_flood_of_coding_rollouts_hardly_slows_down_the_lightest_job() -> None:
    # Given three jobs on 96 cores, the lightest of which runs builds and tests on many cores now and then
    case = Case(1, 96, (16, 24, 48), 200, 7)
    calm = lightest_act_s(case, 48)
    # When the third one has four times as many rollouts, then the lightest hardly feels it, which without shares it does
    assert lightest_act_s(case, case.flood) <= 1.1 * calm
    assert lightest_act_s(case, case.flood, without=("shares",)) > 2.0 * calm
