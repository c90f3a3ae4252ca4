"""The size of what is brought, and the demand that it goes by."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.core.core import Core
from scheduler.gpu.demand import Demands
from scheduler.gpu.sizing import Backlog, best_size
from scheduler.model import NodeSpec, ServiceSpec, Waiting, events
from scheduler.policies import make_policy
from tangram.action import Action

DURATIONS_S = (1.0, 1.0 / 1.84, 1.0 / 3.2)
"""One action on 1, 2 and 4 cells."""


def waiting(service: str, at: float, work_s: float = 1.0) -> Waiting:
    action = Action(kind="gpu.score", service=service)
    return Waiting(id="a", action=action, seq=1, submitted_at=at, received_at=at, units=(1,), durations_s=(work_s,))


def size_for(per_cell: float, durations_s: tuple[float, ...] = DURATIONS_S, restore_s: float = 0.15) -> int:
    return best_size((1, 2, 4), durations_s, restore_s, per_cell)


def test_the_more_there_is_to_do_the_fewer_cells_each_has() -> None:
    sizes = [size_for(present / 16) for present in range(60)]

    assert sizes == sorted(sizes, reverse=True)
    assert set(sizes) == {4, 2, 1}


def test_what_gains_nothing_from_more_cells_has_as_few_as_can_be() -> None:
    assert size_for(0.0, (1.0, 1.0, 1.0)) == 1
    assert size_for(0.0, (1.0, 0.5, 0.5)) == 2


def test_the_rate_of_a_steady_stream_is_found_and_fades_when_it_ends() -> None:
    # Given two arrivals a second
    demands = Demands(8.0)
    for number in range(120):
        demands.arrived(waiting("rm", number / 2), number / 2)
    assert demands.rate("rm") == pytest.approx(2.0, rel=0.1)

    # When they end
    demands.loads(160.0)

    # Then little is left of it
    assert demands.rate("rm") < 0.02


def test_actions_that_came_before_a_restart_count_for_less() -> None:
    demands = Demands(8.0)
    demands.arrived(waiting("old", 0.0), 40.0)
    demands.arrived(waiting("new", 40.0), 40.0)

    assert demands.rate("old") < 0.01 * demands.rate("new")


def test_the_load_is_how_many_would_be_running() -> None:
    # Given two arrivals a second of three seconds each
    demands = Demands(8.0)
    for number in range(240):
        demands.arrived(waiting("rm", number / 2, work_s=3.0), number / 2)

    assert demands.loads(119.5)["rm"] == pytest.approx(6.0, rel=0.1)
    assert demands.loads(1000.0)["rm"] < 0.01


def test_what_waits_counts_for_the_cells_that_it_could_use() -> None:
    # Given nodes of which two could run one service each, and the third both
    core = Core(make_policy("elastic"))
    for number, cells in enumerate((8, 24, 8)):
        core.handle(events.NodeJoined(node=NodeSpec(name=f"n{number}", pools=("gpu",), cells=cells)), 0.0)
    only_a, only_b, both = core.pools.gpu.groups.values()
    backlog = Backlog((only_a, only_b, both))

    # When sixteen wait for the one, and sixty-four for the other
    backlog.spread(16, [only_a, both])
    backlog.spread(64, [only_b, both])

    # Then each is spread over its cells, and counts for the other where they share them
    assert backlog.per_cell([only_a, both]) == pytest.approx((16 + 64 * 8 / 32) / 16)
    assert backlog.per_cell([only_b, both]) == pytest.approx((64 + 16 * 8 / 16) / 32)
    assert backlog.per_cell([]) == 0.0


def test_one_that_comes_after_a_crowd_has_the_largest_instance_that_is_idle(world: Any) -> None:
    # Given instances of four cells and of one, both busy, and a crowd for which the large one was to make way until it is cancelled
    w = world(services=[ServiceSpec(name="rm", cells=(1, 2, 4))]).node(cells=5)
    for name in ("a", "b", *(f"c{number}" for number in range(40))):
        w.score(name, "rm", cells=[1, 2, 4], parallel=0.9, work_s=1.0)
    assert (w.grants["a"].units, w.grants["b"].units) == (4, 1)
    w.handle(events.Cancelled(ids=tuple(f"c{number}" for number in range(40)), reason="not wanted"))
    w.finish("a")
    w.finish("b")

    # When one comes later on
    w.tick(600.0)
    w.score("d", "rm", cells=[1, 2, 4], parallel=0.9, work_s=1.0)

    # Then it has the large one
    assert w.grants["d"].units == 4


def test_a_crowd_for_cells_of_other_services_leaves_instances_large(world: Any) -> None:
    # Given services on nodes of their own, of which one has forty actions on eight cells
    sizes: dict[str, Any] = {"cells": (1, 2, 4), "restore_s": 0.5}
    w = world(services=[ServiceSpec(name="rm", **sizes), ServiceSpec(name="judge", **sizes)])
    w.node("own", cells=8, services=frozenset({"rm"}))
    w.node("others", cells=8, services=frozenset({"judge"}))
    for number in range(40):
        w.score(f"j{number}", "judge", cells=[1, 2, 4], parallel=0.9, work_s=1.0)

    # When one comes for the other
    w.score("r", "rm", cells=[1, 2, 4], parallel=0.9, work_s=1.0)

    # Then what is brought for it is as large as if it were alone
    assert w.grants["r"].units == 4
