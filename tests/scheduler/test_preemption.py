"""Cores that are taken back: who loses them, who gets them, and what becomes of those in the background."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from scheduler.cpu.tuning import TUNING
from scheduler.model import commands, events


def node(world: Any, cores: int = 1, environments: Iterable[str] = "efgh", without: Iterable[str] = (), **jobs: str) -> Any:
    """Return a world with a node and environments on it."""
    w = world(without=without).node(cores=cores)
    for environment in environments:
        w.open(environment, job=jobs.get(environment, "default"))
    return w


def queued(w: Any) -> list[str]:
    return [waiting.id for waiting in w.core.pools.cpu.groups["n0"].queue]


# Who takes cores from whom


def test_a_newcomer_takes_the_core_of_what_has_run_for_long(world: Any) -> None:
    w = node(world)
    w.exec("long", "e")
    w.tick(10.0)
    w.exec("newcomer", "f")
    assert w.grants["newcomer"].core_ids == (0,)
    assert (w.background, w.grants["long"].core_ids, w.grants["long"].attempt) == (["long"], (), 1)
    assert queued(w) == ["long"]
    w.tick(1.0)
    w.finish("newcomer")
    assert (w.background, w.grants["long"].core_ids) == ([], (0,))
    assert queued(w) == []


def test_what_is_not_long_is_served_in_the_order_of_arrival_whatever_its_trajectory(world: Any) -> None:
    # Given a core that is taken, and a command of an old trajectory that came before one of a young one
    w = node(world)
    w.exec("old", "e")
    w.tick(100.0)
    w.finish("old")
    w.exec("firm", "f", preemptible=False)
    w.exec("first", "e")
    w.exec("second", "g")
    w.finish("firm")
    assert (w.grants["first"].core_ids, w.background) == ((0,), ["second"])
    # and once the first one is long, the second takes its core
    w.tick(200.0)
    assert (w.grants["second"].core_ids, w.background) == ((0,), ["first"])


@pytest.mark.parametrize("kind", ["not preemptible", "a task"])
def test_what_is_not_preemptible_keeps_its_core_and_the_newcomer_starts_in_the_background(world: Any, kind: str) -> None:
    w = node(world)
    if kind == "a task":
        w.submit("firm", "build", cost={"cores": 1})
    else:
        w.exec("firm", "e", preemptible=False)
    w.tick(100.0)
    w.exec("newcomer", "f", priority=9)
    assert w.grants["firm"].core_ids == (0,)
    assert w.background == ["newcomer"]
    # nor does such a one start in the background itself
    w.exec("firm too", "g", preemptible=False)
    w.run("task", 1)
    assert w.waiting == ["firm too", "task"]


def test_priority_comes_before_expectation(world: Any) -> None:
    w = node(world)
    w.exec("long", "e", priority=8)
    w.tick(100.0)
    # When one of usual priority comes, then it gets no core; one that is as high does
    w.exec("usual", "f")
    assert w.background == ["usual"]
    w.exec("high", "g", priority=8)
    assert w.background == ["long", "usual"]
    # And what is of higher priority takes the core at once, however much is expected of it
    w.finish("high")
    w.exec("highest", "e", priority=9)
    assert w.grants["highest"].core_ids == (0,)


def test_a_job_beyond_its_share_loses_its_cores_first(world: Any) -> None:
    # Given a full node of one job's commands, of which next to nothing is expected, and a trajectory of another job that is old
    def run(**options: Any) -> Any:
        w = node(world, cores=4, e="few", f="many", **options)
        w.exec("old", "e", job="few")
        w.tick(100.0)
        w.finish("old")
        w.several(w.exec, "many", 4, "f", job="many")
        w.exec("more", "e", job="few")
        return w

    # Then it has one; without shares it has none
    assert [name[:4] for name in run().background] == ["many"]
    assert run(without=["shares"]).background == ["more"]


def test_extra_units_go_before_cores(world: Any) -> None:
    w = node(world, cores=4)
    w.exec("wide", "e", [1, 2, 4], parallel=0.99, work_s=1000.0)
    assert w.units["wide"] == 4
    w.tick(100.0)
    w.exec("newcomer", "f")
    assert (w.units, w.background) == ({"wide": 2, "newcomer": 1}, [])
    w.several(w.exec, "next", 3, "g")
    assert w.background == ["wide"]


def test_a_wide_command_takes_as_many_holders_as_it_needs_or_none(world: Any) -> None:
    # Given a node with two commands that have run for long, and one that keeps its core
    w = node(world, cores=3)
    w.exec("firm", "h", preemptible=False)
    w.exec("long0", "e")
    w.exec("long1", "f")
    w.tick(100.0)
    w.exec("too wide", "g", 3)
    assert (w.background, w.grants["long0"].core_ids, w.grants["long1"].core_ids) == (["too wide"], (1,), (2,))
    w.exec("wide", "g", 2)
    assert w.background == ["long0", "long1", "too wide"]


# In the background


def test_what_finds_all_cores_taken_starts_in_the_background_up_to_so_many_per_core(world: Any) -> None:
    w = node(world)
    w.exec("firm", "e", preemptible=False)
    for number in range(TUNING.background_per_core + 3):
        w.exec(f"a{number:02}", "f")
    assert w.background == [f"a{number:02}" for number in range(TUNING.background_per_core)]
    assert w.waiting == [f"a{number:02}" for number in range(TUNING.background_per_core, TUNING.background_per_core + 3)]
    w.finish("a03")
    assert w.grants[f"a{TUNING.background_per_core:02}"].background


def test_a_stop_reaches_the_background(world: Any) -> None:
    w = node(world)
    w.exec("long", "e")
    w.tick(10.0)
    w.exec("newcomer", "f")
    w.handle(events.Cancelled(ids=("long",)))
    assert [(stop.id, stop.node, stop.attempt) for stop in w.of(commands.Stop)] == [("long", "n0", 1)]
    w.finish("newcomer")
    assert w.background == ["long"], "what is being stopped gets no core any more"
    w.finish("long", "cancelled")
    assert (w.ended("long")[0], queued(w), w.core.pools.cpu.groups["n0"].running) == ("cancelled", [], {})


def test_the_time_in_the_background_is_a_part_of_its_own_but_for_what_it_slept_which_teaches_nothing(world: Any) -> None:
    # Given commands that have run for ten seconds, and then been in the background for five, where they got two and slept for some time
    learned = []
    for slept_s in (0.0, 1.0, 3.0):
        w = node(world)
        w.tick(1.0)
        w.exec("long", "e")
        w.tick(10.0)
        w.exec("newcomer", "f", priority=9)
        w.tick(5.0)
        action = w.core.state.running["long"].waiting.action
        w.finish("long", execution_s=12.0, waited_s=3.0, slept_s=slept_s)
        learned.append(w.core.state.durations.expect(action))
        end = w.ends["long"]
        assert (end.queue_s, end.background_s, end.overhead_s, end.execution_s) == (0.0, 3.0 - slept_s, 0.0, 12.0 + slept_s)
        assert end.unit_s == 10.0
    # Then the same is expected of the next ones
    assert learned[0] == learned[1] == learned[2]


def test_without_preemption_who_comes_waits(world: Any) -> None:
    w = node(world, without=["preemption"])
    w.exec("long", "e")
    w.tick(100.0)
    w.exec("newcomer", "f", priority=9)
    w.tick(100.0)
    assert (w.waiting, w.background, w.grants["long"].core_ids) == (["newcomer"], [], (0,))


def test_who_may_not_take_from_another_job_takes_from_its_own(world: Any) -> None:
    # Given two jobs with half of the cores each, the other one's command with more work left than this one's
    w = node(world, 2, "efg", e="theirs", f="mine", g="mine")
    w.exec("theirs", "e", job="theirs")
    w.tick(60.0)
    w.exec("mine", "f", job="mine")
    w.tick(100.0)
    w.exec("short", "g", job="mine")
    assert w.grants["short"].core_ids
    assert w.background == ["mine"]


def test_cores_that_a_wide_action_waits_for_are_used_meanwhile_by_what_can_be_taken_back(world: Any) -> None:
    # Given an action that needs the whole node, and a command that may take any time and cannot be taken back
    w = node(world, 4, "ef")
    w.exec("lasting", "e", preemptible=False)
    w.run("wide", cores=4, priority=0)
    w.tick(30.0)
    w.exec("command", "f", priority=9)
    w.run("task", priority=9)
    # Then a command gets a core, which it would lose again, and what cannot be taken back does not
    assert w.grants["command"].core_ids
    assert "task" not in w.grants
    # And when the other one ends, it is the turn of the wide one
    w.finish("lasting")
    assert (len(w.grants["wide"].core_ids), w.background) == (4, ["command"])


def test_what_is_not_preemptible_keeps_all_the_cores_that_it_started_on(world: Any) -> None:
    w = node(world, 4)
    w.exec("timing", "e", [1, 2, 4], parallel=0.95, preemptible=False)
    assert w.grants["timing"].units == 4
    w.tick(1.0)
    w.exec("other", "f")
    assert w.of(commands.Resize) == []


def test_no_report_of_a_worker_makes_an_action_do_more_than_its_node_can(world: Any) -> None:
    w = node(world, 1, "ef")
    w.exec("holds", "e", priority=9)
    w.exec("back", "f")
    w.tick(2.0)
    w.used("back", 1.79e308)
    w.finish("back", execution_s=0.5, waited_s=1.5)
    assert w.core.state.environments["f"].ended_work_s <= 2.0
