"""How often services take the cells from each other, and how large their instances are, under steady streams of actions."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from scheduler.gpu.sizing import best_size
from scheduler.model import ServiceSpec, events
from scheduler.policies import make_policy
from scheduler.sim.cluster import Cluster
from scheduler.sim.simulate import Simulation
from scheduler.sim.summary import ReplayRecord
from scheduler.sim.trace import Step, Trace, TraceAction, Trajectory
from tangram.elasticity import Amdahl, Elasticity

ONE = Elasticity()
UP_TO_FOUR = Elasticity(units=(1, 2, 4), curve=Amdahl(0.9))


def stream(
    service: str, rate: float, work_s: float, until_s: float, *, burst: int = 1, sizes: Elasticity = ONE, from_s: float = 0.0
) -> list[Trajectory]:
    """Draw `rate` actions a second of one service, `burst` at a time, each with half to three halves of `work_s`."""
    rng, drawn, at = Random(f"{service} {rate}"), [], from_s
    while (at := at + rng.expovariate(rate / burst)) < until_s:
        for number in range(burst):
            action = TraceAction(kind="gpu.score", service=service, work_s=work_s * rng.uniform(0.5, 1.5), elasticity=sizes)
            drawn.append(Trajectory(trajectory=f"{service}{at}.{number}", arrival_s=at, steps=(Step(actions=(action,)),)))
    return drawn


def replayed(streams: Sequence[list[Trajectory]], *, cells: int, restore_s: float, sizes: tuple[int, ...] = (1,)) -> ReplayRecord:
    drawn = tuple(sorted((each for one in streams for each in one), key=lambda each: each.arrival_s))
    names = dict.fromkeys(each.steps[0].actions[0].service or "" for each in drawn)
    services = {name: ServiceSpec(name=name, cells=sizes, restore_s=restore_s, memory_mb=60_000) for name in names}
    ended = Simulation(Trace(trajectories=drawn, services=services), make_policy("elastic"), Cluster(nodes=1, cores=0, gpus=cells)).run()
    assert len(ended.actions) == len(drawn)
    return ended


def mean_act_s(run: ReplayRecord) -> float:
    return sum(each.act_s for each in run.actions) / len(run.actions)


def test_a_burst_is_served_in_turns_where_that_takes_less_than_a_restore() -> None:
    # Given two cells, one for each service, that work for a quarter of the time, and restores of fifty actions
    both = [stream("a", 2.0, 0.1, 300.0, burst=4), stream("b", 1.0, 0.1, 300.0)]
    run = replayed(both, cells=2, restore_s=5.0)
    assert run.restores <= 4
    assert mean_act_s(run) <= 0.6


def test_services_that_have_a_cell_each_keep_it() -> None:
    # Given four services that each keep a cell busy for three tenths of the time
    run = replayed([stream(name, 1.5, 0.2, 300.0) for name in "abcd"], cells=4, restore_s=5.0)
    assert run.restores <= 12
    assert mean_act_s(run) <= 1.0


def test_instances_become_smaller_when_large_ones_cannot_keep_up() -> None:
    # Given as much as eight small instances can do, and two large ones cannot, after a time with little to do
    calm = [stream(name, 0.5, 1.0, 60.0, sizes=UP_TO_FOUR) for name in "ab"]
    busy = [stream(name, 3.5, 1.0, 300.0, sizes=UP_TO_FOUR, from_s=60.0) for name in "ab"]
    run = replayed([*calm, *busy], cells=8, restore_s=0.5, sizes=(1, 2, 4))
    last = sorted(run.actions, key=lambda each: each.submitted_at)[-200:]
    assert sum(each.act_s for each in last) / 200 <= 2.5
    assert mean_act_s(run) <= 2.5


# How large what is brought is

DURATIONS_S = (1.0, 1.0 / 1.84, 1.0 / 3.2)
"""One action on 1, 2 and 4 cells."""


def size_for(per_cell: float, durations_s: tuple[float, ...] = DURATIONS_S, restore_s: float = 0.15) -> int:
    return best_size((1, 2, 4), durations_s, restore_s, per_cell)


def test_the_more_there_is_to_do_the_fewer_cells_each_has() -> None:
    sizes = [size_for(present / 16) for present in range(60)]
    assert sizes == sorted(sizes, reverse=True)
    assert set(sizes) == {4, 2, 1}


def test_what_gains_nothing_from_more_cells_has_as_few_as_can_be() -> None:
    assert size_for(0.0, (1.0, 1.0, 1.0)) == 1
    assert size_for(0.0, (1.0, 0.5, 0.5)) == 2


def test_one_that_comes_after_a_crowd_has_the_largest_instance_that_is_idle(world: Any) -> None:
    # Given instances of four cells and of one, both busy, and a crowd for which the large one was to make way until it is cancelled
    w = world(services=[ServiceSpec(name="rm", cells=(1, 2, 4))]).node(cells=5)
    for name in ("a", "b", *(f"c{number}" for number in range(40))):
        w.score(name, "rm", cells=[1, 2, 4], parallel=0.9, work_s=1.0)
    assert (w.grants["a"].units, w.grants["b"].units) == (4, 1)
    w.handle(events.Cancelled(ids=tuple(f"c{number}" for number in range(40)), reason="not wanted"))
    w.finish("a")
    w.finish("b")
    w.tick(600.0)
    w.score("d", "rm", cells=[1, 2, 4], parallel=0.9, work_s=1.0)
    assert w.grants["d"].units == 4


def test_a_crowd_for_cells_of_other_services_leaves_instances_large(world: Any) -> None:
    # Given services on nodes of their own, of which one has forty actions on eight cells
    sizes: dict[str, Any] = {"cells": (1, 2, 4), "restore_s": 0.5}
    w = world(services=[ServiceSpec(name="rm", **sizes), ServiceSpec(name="judge", **sizes)])
    w.node("own", cells=8, services=frozenset({"rm"}))
    w.node("others", cells=8, services=frozenset({"judge"}))
    w.several(w.score, "j", 40, "judge", cells=[1, 2, 4], parallel=0.9, work_s=1.0)
    w.score("r", "rm", cells=[1, 2, 4], parallel=0.9, work_s=1.0)
    # Then what is brought for it is as large as if it were alone
    assert w.grants["r"].units == 4
