"""A job within its share is brought its service, though a job beyond its share could keep all instances busy for ever."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.model import ServiceSpec, events

FLOODED = ServiceSpec(name="flooded", restore_s=0.5)
RARE = ServiceSpec(name="rare", restore_s=0.5)
WIDE = ServiceSpec(name="wide", cells=(4,), restore_s=0.5)


def flood(w: Any, count: int) -> None:
    """Have a job ask for far more than the cells can do."""
    for number in range(count):
        w.score(f"f{number}", "flooded", job="flood")


def test_an_instance_that_falls_idle_goes_to_whom_cells_are_owed(world: Any) -> None:
    # Given cells that are all busy with a job that has more waiting, and an action of another job for a service that is nowhere
    w = world(services=[FLOODED, RARE]).node(cells=4)
    flood(w, 10)
    w.score("r", "rare", job="modest")
    w.finish("f0")
    assert w.evicted("r") == ["flooded"]
    w.finish("f1")
    assert "f4" in w.grants


@pytest.mark.parametrize("without", [[], ["shares"]])
def test_cells_that_are_kept_for_somebody_are_used_again_when_it_is_cancelled(world: Any, without: list[str]) -> None:
    # Given an instance that is kept idle for an action which needs more cells than are idle
    w = world(services=[FLOODED, WIDE], without=without).node(cells=4)
    flood(w, 10)
    w.score("w", "wide", job="modest", trajectory="t")
    w.tick(1.0)
    w.finish("f0")
    assert ("f4" in w.grants) == bool(without)

    w.handle(events.Cancelled(ids=("w",), reason="not wanted"))
    w.tick(1.0)

    assert {"f1", "f2", "f3", "f4"} <= set(w.grants)
