"""What each policy decides: degrees of parallelism, resizing, pods."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.model import commands, events
from scheduler.policies import UnknownPolicy, make_policy

UNITS = [1, 2, 4, 8]


def test_elastic_runs_a_lone_action_on_its_best_units(world: Any) -> None:
    w = world()
    w.node(cores=16)
    w.run("a", UNITS, parallel=0.9, work_s=10.0)

    assert w.units == {"a": 8}


def test_elastic_grows_what_runs_into_cores_that_fall_free(world: Any) -> None:
    w = world()
    w.node(cores=8)
    w.run("short", 6, work_s=1.0)
    w.run("long", UNITS, parallel=0.95, work_s=100.0)
    assert w.units["long"] == 2

    w.now = 1.0
    w.finish("short")

    assert w.units["long"] == 8
    assert w.grants["long"].core_ids[:2] == (6, 7)


def test_elastic_shrinks_what_runs_when_others_wait(world: Any) -> None:
    w = world()
    w.node(cores=8)
    w.run("first", UNITS, parallel=0.95, work_s=100.0)
    assert w.units["first"] == 8

    w.now = 1.0
    w.run("second", UNITS, parallel=0.95, work_s=100.0)

    assert w.units == {"first": 4, "second": 4}
    shrink, start = w.out[-2:]
    assert isinstance(shrink, commands.Resize)
    assert isinstance(start, commands.Start)
    assert set(shrink.core_ids).isdisjoint(start.grant.core_ids)


def test_elastic_lets_every_waiting_action_start_before_anyone_has_extra_cores(world: Any) -> None:
    w = world()
    w.node(cores=8)
    for number in range(8):
        w.run(f"a{number}", UNITS, parallel=0.95, work_s=100.0)

    assert w.units == {f"a{number}": 1 for number in range(8)}


def test_elastic_gives_spare_cores_to_whom_they_help_most(world: Any) -> None:
    w = world()
    w.run("flat", UNITS, parallel=0.1, work_s=10.0)
    w.run("steep", UNITS, parallel=0.99, work_s=10.0)
    w.node(cores=9)

    assert w.units == {"flat": 1, "steep": 8}


def test_elastic_does_not_resize_for_next_to_nothing(world: Any) -> None:
    w = world()
    w.node(cores=4)
    w.run("other", 3, work_s=1.0)
    w.run("tiny", [1, 4], parallel=0.9, work_s=0.05)

    w.finish("other")

    assert w.of(commands.Resize) == []


def test_elastic_does_not_flap_when_short_actions_come_and_go(world: Any) -> None:
    # Given a long elastic action beside a steady stream of short ones
    w = world()
    w.node(cores=8)
    w.run("long", UNITS, parallel=0.95, work_s=500.0)
    for number in range(50):
        w.now += 1.0
        w.run(f"s{number}", 4, work_s=0.5)
        w.now += 0.5
        w.finish(f"s{number}")

    # Then it is resized at most once for each that comes and once for each that goes
    assert len(w.of(commands.Resize)) <= 100
    before = len(w.of(commands.Resize))

    # And not at all while nothing comes or goes
    for _ in range(20):
        w.tick(1.0)
    w.beat(running=("long",))
    assert len(w.of(commands.Resize)) == before


def test_elastic_leaves_an_action_that_is_being_stopped_as_it_is(world: Any) -> None:
    w = world()
    w.node(cores=8)
    w.run("other", 4)
    w.run("stopping", [1, 2, 4, 8], parallel=0.95, work_s=100.0)
    w.handle(events.Cancelled(ids=("stopping",)))

    w.finish("other")

    assert w.of(commands.Resize) == []


def test_paper_never_resizes_what_runs(world: Any) -> None:
    w = world("paper")
    w.node(cores=8)
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


def test_paper_starts_both_where_they_do_not_scale(world: Any) -> None:
    w = world("paper")
    for name in ("a", "b"):
        w.run(name, [1, 8], parallel=0.1, work_s=8.0)
    w.node(cores=8)

    assert w.units == {"a": 1, "b": 1}


def test_fcfs_takes_the_smallest_amount(world: Any) -> None:
    w = world("fcfs")
    w.node(cores=8)
    w.run("a", [2, 4], parallel=0.9)

    assert w.units == {"a": 2}


@pytest.mark.parametrize(("allowed", "granted"), [([1, 2, 4, 8], 4), ([1, 3, 5], 3), ([1], 1), ([6, 8], 6)])
def test_fixed_takes_n_or_the_nearest_allowed_below(world: Any, allowed: list[int], granted: int) -> None:
    w = world("fixed:4")
    w.node(cores=8)
    w.run("a", allowed, parallel=0.9)

    assert w.units == {"a": granted}


def test_fixed_waits_for_all_of_its_units(world: Any) -> None:
    w = world("fixed:4")
    w.node(cores=6)
    w.run("a", UNITS, parallel=0.9)
    w.run("b", UNITS, parallel=0.9)

    assert w.waiting == ["b"]


def test_fixed_takes_less_on_a_node_that_has_less(world: Any) -> None:
    w = world("fixed:8")
    w.node(cores=4)
    w.run("a", UNITS, parallel=0.9)

    assert w.units == {"a": 4}


def test_static_pods_hold_their_cores_for_life(world: Any) -> None:
    w = world("static:4")
    w.node(cores=8)
    for name in ("e0", "e1", "e2"):
        w.open(name)
    assert w.waiting == ["open-e2"]
    assert w.core.pools.cpu.groups["n0"].free == 0

    w.close("e0")
    w.finish("close-e0")

    assert w.grants["open-e2"].core_ids == (0, 1, 2, 3)


def test_a_pod_waits_for_the_cores_of_actions_outside_of_any_pod(world: Any) -> None:
    w = world("static:4")
    w.node(cores=4)
    w.run("a")
    w.open("e0", finish=False)
    assert w.waiting == ["open-e0"]

    w.finish("a")

    assert "open-e0" in w.grants


def test_static_actions_run_at_their_best_within_the_pod(world: Any) -> None:
    w = world("static:4")
    w.node(cores=8)
    w.open("e0")
    w.exec("a", "e0", UNITS, parallel=0.9)

    assert w.grants["a"].core_ids == (0, 1, 2, 3)
    w.exec("b", "e0", UNITS, parallel=0.9)
    assert w.waiting == ["b"]


def test_static_shares_the_pod_between_actions_of_one_moment(world: Any) -> None:
    w = world("static:4")
    w.node(cores=4)
    w.open("e0", finish=False)
    w.exec("a", "e0", [1, 2, 3], parallel=0.9)
    w.exec("b", "e0", [1, 2, 3], parallel=0.9)

    w.finish("open-e0")

    assert w.units == {"a": 3, "b": 1}


def test_a_pod_is_as_large_as_the_most_demanding_action_of_its_trajectory(world: Any) -> None:
    w = world("static:2")
    w.node(cores=8)
    w.open("e0", cores=6, finish=False)

    assert len(w.grants["open-e0"].core_ids) == 6


@pytest.mark.parametrize("name", ["", "best", "fixed", "fixed:", "fixed:0", "fixed:-1", "fixed:x", "static:1.5", "static:٣", "elastic:2"])
def test_an_unknown_policy_is_named(name: str) -> None:
    with pytest.raises(UnknownPolicy, match="^policy "):
        make_policy(name)


@pytest.mark.parametrize("name", ["elastic", "paper", "fcfs", "fixed:3", "static:3"])
def test_a_policy_knows_its_name(name: str) -> None:
    assert make_policy(name).name == name


@given(
    free=st.integers(1, 12),
    sizes=st.lists(st.sampled_from([(1,), (2,), (1, 2), (1, 4), (2, 3, 5)]), min_size=1, max_size=6),
    policy=st.sampled_from(["elastic", "paper", "fcfs", "fixed:2", "static:2"]),
)
def test_no_policy_hands_out_more_than_there_is(world: Any, free: int, sizes: list[tuple[int, ...]], policy: str) -> None:
    w = world(policy)
    for number, units in enumerate(sizes):
        w.run(f"a{number}", list(units), parallel=0.9, work_s=5.0)
    w.node(cores=free)

    assert sum(w.units.values()) <= free
    assert all(w.units[name] in units for name, units in zip((f"a{n}" for n in range(9)), sizes, strict=False) if name in w.units)
    first = sizes[0][0]
    assert ("a0" in w.units) == (first <= free)
