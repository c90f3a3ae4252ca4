"""Sharing cores: who is put together when cores are short, who gets a core of its own again, and how much that slows down."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.commands import Resize
from scheduler.durations import SETTLED, Estimate, Observation
from scheduler.policies.elastic import MOST_SLOWER, Elastic
from scheduler.progress import Live, SharedCores
from scheduler.simulate import Cluster, Simulation
from scheduler.summary import RunRecord
from scheduler.trace import Step, Trace, TraceAction, Trajectory
from tangram.elasticity import FLAT

EIGHTH, QUARTER, HALF = 0.05, 0.12, 0.2
"""Parts of a core that a class needs, so that an eighth, a quarter, a half of one does for it."""


def history(name: str = "light", busy: float = EIGHTH, kind: str = "build") -> list[Observation]:
    one = Observation(
        job="default",
        kind=kind,
        action_class=name,
        service=None,
        units=(1,),
        curve=FLAT,
        held_units=1.0,
        execution_s=10.0,
        cpu_s=10.0 * busy,
    )
    return [one] * 2 * SETTLED


@pytest.fixture
def full(world: Any) -> Any:
    """Give a node whose four cores run an action each that needs next to nothing of its core."""
    w = world(history=history())
    w.node(cores=4)
    for number in range(4):
        w.run(f"light{number}", action_class="light")
    assert all(grant.share == 1.0 for grant in w.grants.values())
    return w


def shared(w: Any) -> dict[int, list[str]]:
    cores: dict[int, list[str]] = {}
    for action_id, grant in w.grants.items():
        if grant.share < 1.0:
            cores.setdefault(grant.core_ids[0], []).append(action_id)
    return cores


@pytest.mark.parametrize(
    ("busy", "share"), [(0.01, 0.125), (EIGHTH, 0.125), (QUARTER, 0.25), (HALF, 0.5), (0.4, 1.0), (0.5, 1.0), (1.0, 1.0)]
)
def test_a_share_is_as_small_as_it_may_be(busy: float, share: float) -> None:
    intensity = -(-busy * 16 // 1) / 16

    assert Elastic().share_of_core((1,), Estimate(1.0, FLAT, intensity)) == share


@pytest.mark.parametrize("units", [(2,), (1, 2)])
def test_only_what_runs_on_one_core_can_share_one(units: tuple[int, ...]) -> None:
    assert Elastic().share_of_core(units, Estimate(1.0, FLAT, 1 / 16)) == 1.0


@given(st.integers(1, 16))
def test_no_share_slows_down_by_more_than_it_may_as_expected(sixteenths: int) -> None:
    busy = sixteenths / 16
    share = Elastic().share_of_core((1,), Estimate(1.0, FLAT, busy))

    others = (1.0 / share - 1.0) * busy
    assert share == 1.0 or busy * others / (1.0 - others) <= MOST_SLOWER


def test_while_there_are_free_cores_nothing_is_shared(full: Any) -> None:
    assert full.of(Resize) == []


def test_on_a_full_node_a_light_action_shares_the_core_of_another(full: Any) -> None:
    # When a fifth one comes
    full.run("light4", action_class="light")

    # Then one of the four keeps an eighth of its core, and the newcomer has another eighth
    assert full.waiting == []
    assert shared(full) == {0: ["light0", "light4"]}
    assert full.grants["light4"].share == full.grants["light0"].share == 0.125


def test_a_core_is_shared_until_it_is_full_before_another_one_is(full: Any) -> None:
    for number in range(4, 20):
        full.run(f"light{number}", action_class="light")

    assert [len(ids) for ids in shared(full).values()] == [8, 8, 3]


def test_for_a_heavy_action_two_light_ones_are_put_together(full: Any) -> None:
    # When one comes that needs a core of its own
    full.run("heavy")

    # Then it has one that a light one left
    assert full.waiting == []
    assert full.grants["heavy"].share == 1.0
    assert [len(ids) for ids in shared(full).values()] == [2]


def test_for_an_action_on_several_cores_as_many_are_freed_as_it_needs(full: Any) -> None:
    full.run("heavy", 3)

    assert len(full.grants["heavy"].core_ids) == 3
    assert [len(ids) for ids in shared(full).values()] == [4]


def test_without_fractions_everybody_has_a_core_or_waits(world: Any) -> None:
    w = world(history=history(), without=["fractions"])
    w.node(cores=1)
    w.run("a", action_class="light")
    w.run("b", action_class="light")

    assert w.waiting == ["b"]


def test_extra_units_are_taken_back_before_anybody_shares(world: Any) -> None:
    w = world(history=history())
    w.node(cores=4)
    w.run("elastic", [1, 3], parallel=0.9, work_s=100.0)
    w.run("light0", action_class="light")

    w.run("light1", action_class="light")

    assert w.units["elastic"] == 1
    assert shared(w) == {}


def test_classes_of_different_appetite_share_one_core_as_far_as_it_goes(world: Any) -> None:
    w = world(history=history("eighth", EIGHTH) + history("quarter", QUARTER) + history("half", HALF))
    w.node(cores=1)
    for number, name in enumerate(["half", "quarter", "eighth", "quarter", "eighth"]):
        w.run(f"a{number}", action_class=name)

    # Then the second quarter finds no room, and what is behind it does not overtake it
    assert {name: grant.share for name, grant in w.grants.items()} == {"a0": 0.5, "a1": 0.25, "a2": 0.125}
    assert w.waiting == ["a3", "a4"]


def test_when_cores_fall_free_in_number_everybody_has_one_of_its_own_again(full: Any) -> None:
    for number in range(4, 8):
        full.run(f"light{number}", action_class="light")
    assert sum(len(ids) for ids in shared(full).values()) == 5

    for number in (1, 2, 3):
        full.finish(f"light{number}")

    # Then all but what has to be left free is given out
    assert sum(len(ids) for ids in shared(full).values()) < 5
    assert len({core for grant in full.grants.values() for core in grant.core_ids}) >= 3


def test_an_action_that_needs_more_than_its_share_gets_a_free_core_at_once(full: Any) -> None:
    # Given five light actions on four cores, of which one then ends
    full.run("light4", action_class="light")
    full.finish("light3")
    assert shared(full) == {0: ["light0", "light4"]}

    # When one on the shared core has used half of it
    full.now = 2.0
    full.used("light4", 1.0)

    # Then it has a core of its own, and keeps it when cores are short again
    assert full.grants["light4"].share == 1.0
    for number in range(3):
        full.run(f"heavy{number}")
    assert full.grants["light4"].share == 1.0
    assert full.waiting == ["heavy2"]


def test_an_action_that_needs_more_than_its_share_gets_the_next_core_that_falls_free(full: Any) -> None:
    full.run("light4", action_class="light")
    full.now = 2.0
    full.used("light4", 1.0)
    assert full.grants["light4"].share == 0.125

    full.run("waits", 4)
    full.finish("light2")

    assert full.grants["light4"].share == 1.0
    assert full.waiting == ["waits"]


def test_extra_units_of_others_are_taken_for_an_action_that_needs_more_than_its_share(world: Any) -> None:
    # Given two light actions that were put together for a third, and an elastic one that has grown since
    w = world(history=history())
    w.node(cores=3)
    for name in ("light0", "light1"):
        w.run(name, action_class="light")
    w.run("heavy", 2)
    w.run("elastic", [1, 2], parallel=0.9, work_s=100.0)
    assert w.waiting == ["elastic"]
    w.finish("heavy")
    assert w.units["elastic"] == 2

    w.now = 2.0
    w.used("light1", 1.9)

    assert w.grants["light1"].share == 1.0
    assert w.units["elastic"] == 1


def test_using_no_more_than_its_share_changes_nothing(full: Any) -> None:
    full.run("light4", action_class="light")
    full.now = 10.0
    seen = len(full.out)

    full.used("light4", 1.0)
    full.used("light0", 1.25)
    full.used("light1", 10.0)

    assert full.out[seen:] == []


def test_a_shared_core_is_free_once_the_last_of_it_has_ended(full: Any) -> None:
    full.run("heavy", 3)
    for number in range(4):
        full.finish(f"light{number}")

    full.run("next")

    assert full.waiting == []
    assert full.grants["next"].share == 1.0


# What it costs


def rollouts(count: int, work_s: float, busy: float, draw: random.Random) -> list[Trajectory]:
    """Return rollouts of commands that wait for most of their time."""

    def step() -> Step:
        took_s = draw.lognormvariate(0.0, 0.3) * work_s
        return Step(
            actions=(TraceAction(kind="cpu.exec", work_s=took_s, cpu_s=took_s * busy, action_class="light"),),
            think_s=draw.expovariate(1 / 2.0),
        )

    return [
        Trajectory(trajectory=f"t{number}", steps=tuple(step() for _ in range(15)), arrival_s=draw.uniform(0.0, 20.0))
        for number in range(count)
    ]


def slowed_down(run: RunRecord) -> float:
    """Return how many times as long actions took as they would have taken alone."""
    return sum(record.execution_s for record in run.actions) / sum(record.floor_s for record in run.actions)


@pytest.mark.parametrize("busy", [0.02, 0.05, 0.1, 0.2])
def test_those_that_share_are_slowed_down_by_no_more_than_was_promised(busy: float) -> None:
    # Given five times as many waiting commands as cores
    trace = Trace(trajectories=tuple(rollouts(40, 4.0, busy, random.Random(7))))

    sharing, alone = (Simulation(trace, Elastic(without), Cluster(cores=8)).run() for without in ((), ("fractions",)))

    # Then they share cores, are hardly slower for it, and are all done much earlier
    assert 1.0 < slowed_down(sharing) <= 1.0 + MOST_SLOWER
    assert slowed_down(alone) == pytest.approx(1.0)
    assert sharing.last_result_s < 0.8 * alone.last_result_s
    assert max(cores for _, cores in sharing.cores_granted) <= 8.0


def live(number: int, work_s: float, busy: float) -> Live:
    one = Live(f"a{number}", TraceAction(kind="cpu.exec", work_s=work_s, cpu_s=work_s * busy), 0.0, 0.0)
    one.units, one.core_ids, one.share, one.node = 1, (0,), 0.125, "n0"
    return one


def test_alone_on_a_shared_core_nothing_is_slower() -> None:
    one, cores = live(0, 10.0, 0.5), SharedCores(lambda _: None)
    cores.enter(one, 0.0)

    assert one.end_at() == 10.0


def test_two_that_need_the_core_all_the_time_take_twice_as_long() -> None:
    # Given one that runs alone for four seconds, and is joined by another
    one, other, cores = live(0, 10.0, 1.0), live(1, 3.0, 1.0), SharedCores(lambda _: None)
    cores.enter(one, 0.0)
    other.since = 4.0
    cores.enter(other, 4.0)
    assert (one.end_at(), other.end_at()) == (16.0, 10.0)

    # When that one has ended
    cores.leave(other, 10.0)

    # Then the first goes on alone
    assert one.end_at() == 13.0


def test_what_waits_most_of_the_time_is_slowed_down_by_as_much_as_the_other_is_there() -> None:
    one, other, cores = live(0, 10.0, 0.1), live(1, 10.0, 0.2), SharedCores(lambda _: None)
    cores.enter(one, 0.0)
    cores.enter(other, 0.0)

    assert one.end_at() == pytest.approx(10.0 * (0.9 + 0.1 / 0.8))
    assert other.end_at() == pytest.approx(10.0 * (0.8 + 0.2 / 0.9))
    cores.leave(one, one.end_at())
    assert one.cpu_s_at(one.end_at()) == pytest.approx(1.0)
