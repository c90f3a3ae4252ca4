"""What each policy decides: degrees of parallelism, resizing, pods."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.model import commands
from scheduler.policies import UnknownPolicy, make_policy

UNITS = [1, 2, 4, 8]


def test_paper_never_resizes_what_runs(world: Any) -> None:
    w = world("paper").node(cores=8)
    w.run("first", UNITS, parallel=0.95, work_s=100.0)
    w.run("second", UNITS, parallel=0.95, work_s=100.0)
    assert w.of(commands.Resize) == []
    assert w.waiting == ["second"]


def test_paper_puts_the_last_candidate_off_where_that_lowers_the_total(world: Any) -> None:
    # Given two actions that scale perfectly: one after the other is better than both at half the cores
    w = world("paper")
    for name in ("a", "b"):
        w.run(name, [1, 8], parallel=1.0, work_s=8.0)
    w.node(cores=8)
    assert w.units == {"a": 8}


@pytest.mark.parametrize(
    ("policy", "cores", "allowed", "granted"),
    [
        ("fcfs", 8, [2, 4], [2, 2, 2, 2]),
        ("fixed:4", 8, [1, 2, 4, 8], [4, 4]),
        ("fixed:4", 8, [1, 3, 5], [3, 3]),
        ("fixed:4", 8, [1], [1] * 8),
        ("fixed:4", 8, [6, 8], [6]),
        ("fixed:4", 6, [1, 2, 4, 8], [4]),
        ("fixed:8", 4, [1, 2, 4, 8], [4]),
    ],
)
def test_fcfs_takes_the_smallest_amount_and_fixed_waits_for_n_or_the_nearest_allowed_below(
    world: Any, policy: str, cores: int, allowed: list[int], granted: list[int]
) -> None:
    w = world(policy).node(cores=cores)
    w.several(w.run, "a", 9, allowed, parallel=0.9)
    assert list(w.units.values()) == granted


def test_a_pod_waits_for_the_cores_of_actions_outside_of_any_pod(world: Any) -> None:
    w = world("static:4").node(cores=4)
    w.run("a")
    w.open("e0", finish=False)
    assert w.waiting == ["open-e0"]
    w.finish("a")
    assert "open-e0" in w.grants


def test_static_actions_run_at_their_best_within_the_pod(world: Any) -> None:
    w = world("static:4").node(cores=8).open("e0")
    w.exec("a", "e0", UNITS, parallel=0.9)
    assert w.grants["a"].core_ids == (0, 1, 2, 3)
    w.exec("b", "e0", UNITS, parallel=0.9)
    assert w.waiting == ["b"]


@pytest.mark.parametrize("name", ["", "best", "fixed", "fixed:", "fixed:0", "fixed:-1", "fixed:x", "static:1.5", "static:٣", "elastic:2"])
def test_an_unknown_policy_is_named(name: str) -> None:
    with pytest.raises(UnknownPolicy, match="^policy "):
        make_policy(name)
