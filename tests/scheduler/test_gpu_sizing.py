"""The size of what is brought, and the demand that it goes by."""

from __future__ import annotations

from typing import Any

from scheduler.gpu.sizing import best_size
from scheduler.model import ServiceSpec, events

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
