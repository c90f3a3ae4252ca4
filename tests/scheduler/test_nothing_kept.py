"""A scheduler of weeks: what has ended is no longer in memory, whether others wait for its cores or not."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from scheduler.model import Running


@pytest.mark.parametrize("cores", [(1,), (1, 2, 4)], ids=["rigid", "elastic"])
@pytest.mark.parametrize("of_node", [1, 64], ids=["short", "plenty"])
def test_actions_that_have_ended_are_not_kept(world: Any, cores: tuple[int, ...], of_node: int) -> None:
    # Given a node on which a command goes on for long, and 500 short ones that come and end beside it, some of which outlast a turn
    w = world().node(cores=of_node)
    for environment in "ef":
        w.open(environment)
    w.exec("long", "e", cores=cores, parallel=0.9)
    for number in range(500):
        w.exec(f"a{number}", "f", cores=cores, parallel=0.5 + number % 50 / 100)
        w.tick(0.1 if number % 10 else 5.0)
        w.finish(f"a{number}")
        w.out.clear()
    gc.collect()
    kept = sum(type(one) is Running and one.waiting.id.startswith("a") for one in gc.get_objects())
    assert kept < 50
