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
    # Given a core, on which a command has run for ten seconds
    w = node(world)
    w.exec("long", "e")
    w.tick(10.0)

    # When another one comes
    w.exec("newcomer", "f")

    # Then it has that core, and the long one goes on in the background
    assert w.grants["newcomer"].core_ids == (0,)
    assert (w.background, w.grants["long"].core_ids, w.grants["long"].attempt) == (["long"], (), 1)
    assert queued(w) == ["long"]

    # And when the core falls free, that one returns
    w.tick(1.0)
    w.finish("newcomer")
    assert (w.background, w.grants["long"].core_ids) == ([], (0,))
    assert queued(w) == []


def test_of_several_the_one_whose_environment_has_had_most_goes(world: Any) -> None:
    # Given two actions that have run for as long, one of them in an environment that has had much before
    w = node(world, cores=2)
    w.exec("before", "f")
    w.tick(50.0)
    w.finish("before")
    w.exec("young", "e")
    w.exec("old", "f")
    w.tick(5.0)

    w.exec("newcomer", "h")

    assert w.background == ["old"]


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
    # Given a command of high priority that has run for long
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
        for number in range(4):
            w.exec(f"many{number}", "f", job="many")
        # When it wants a core
        w.exec("more", "e", job="few")
        return w

    # Then it has one; without shares it has none
    assert [name[:4] for name in run().background] == ["many"]
    assert run(without=["shares"]).background == ["more"]


def test_a_job_beyond_its_share_takes_no_core_of_one_within_its_own(world: Any) -> None:
    # Given a job within its share whose command has run for long, and one beyond its share
    w = node(world, cores=4, e="few", f="many")
    w.exec("few", "e", job="few")
    w.tick(100.0)
    for number in range(3):
        w.exec(f"many{number}", "f", job="many", preemptible=False)

    w.exec("short", "f", job="many")

    assert w.background == ["short"]


def test_extra_units_go_before_cores(world: Any) -> None:
    # Given a command that has grown over the whole node, and has run for long
    w = node(world, cores=4)
    w.exec("wide", "e", [1, 2, 4], parallel=0.99, work_s=1000.0)
    assert w.units["wide"] == 4
    w.tick(100.0)

    w.exec("newcomer", "f")
    assert (w.units, w.background) == ({"wide": 2, "newcomer": 1}, [])
    for number in range(3):
        w.exec(f"next{number}", "g")
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


# Not to and fro


def test_who_is_expected_to_need_a_little_less_takes_nothing(world: Any) -> None:
    # Given two trajectories of the same age, of which one has run one action all the time
    w = node(world, cores=2)
    w.exec("first", "f")
    w.exec("long", "e")
    w.tick(10.0)
    w.finish("first")
    w.exec("firm", "g", preemptible=False)

    # When the other one comes with its next action, of which a tenth less is expected
    w.exec("second", "f")

    assert w.background == ["second"]


def test_two_that_are_alike_hand_over_seldom(world: Any) -> None:
    # Given two endless commands on one core
    w = node(world)
    w.exec("one", "e")
    w.exec("other", "f")

    # When they run for two hundred seconds
    while w.now < 200.0:
        w.wake()

    # Then they hand over when one comes into its next bin of work, of which there are few, and for turns
    handed_over = [one for one in w.of(commands.Resize) if one.background]
    assert 10 <= len(handed_over) <= 60
    # and looking again moves nothing
    before = len(w.out)
    for _ in range(5):
        w.core.pools.cpu.groups["n0"].touch()
        w.tick()
    assert len(w.out) == before


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


def test_who_has_got_on_in_the_background_comes_after_who_has_not(world: Any) -> None:
    # Given two in the background, one of which has got much of what others left idle
    w = node(world)
    w.exec("firm", "e", preemptible=False)
    w.exec("lucky", "f")
    w.exec("other", "g")
    assert queued(w) == ["lucky", "other"]
    w.tick(5.0)
    w.used("lucky", 5.0)
    assert queued(w) == ["other", "lucky"]

    w.finish("firm")

    assert w.background == ["lucky"]


def test_the_core_of_a_newcomer_that_turns_out_to_be_long_is_taken_back_in_time(world: Any) -> None:
    # Given a command of five seconds in the background of a newcomer
    w = node(world)
    w.exec("five", "e")
    w.tick(5.0)
    w.exec("newcomer", "f")
    assert w.background == ["five"]

    # When nothing else happens, then the newcomer loses its core once clearly more is expected of it
    while w.background == ["five"]:
        w.wake()
    assert 5.5 < w.now < 10.0


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


def test_the_time_in_the_background_counts_as_queueing(world: Any) -> None:
    # Given a command that has run for ten seconds, and then been in the background for five, where it got two
    w = node(world)
    w.tick(1.0)
    w.exec("long", "e")
    w.tick(10.0)
    w.exec("newcomer", "f", priority=9)
    w.tick(5.0)

    w.finish("long", execution_s=12.0, waited_s=3.0)

    end = w.ends["long"]
    assert (end.queue_s, end.execution_s, end.overhead_s, end.unit_s) == (3.0, 12.0, 0.0, 10.0)


# Without


def test_without_preemption_who_comes_waits(world: Any) -> None:
    w = node(world, without=["preemption"])
    w.exec("long", "e")
    w.tick(100.0)

    w.exec("newcomer", "f", priority=9)
    w.tick(100.0)

    assert (w.waiting, w.background, w.grants["long"].core_ids) == (["newcomer"], [], (0,))


# Between jobs


def test_a_wide_command_pushes_no_other_job_below_its_share_and_does_not_go_to_and_fro(world: Any) -> None:
    # Given eight cores, six commands of one job and two of another
    w = node(world, 8, "abcdefghij", **dict.fromkeys("abcdef", "theirs"), **dict.fromkeys("ghij", "mine"))
    for environment in "abcdef":
        w.exec(f"theirs-{environment}", environment, job="theirs")
    for environment in "gh":
        w.exec(f"mine-{environment}", environment, job="mine")
    w.tick(0.5)

    # When one comes for which that other job would have to hold more than its half
    w.exec("wide", "i", 6, job="mine")
    before = len(w.of(commands.Resize))
    for _ in range(100):
        w.tick(0.1)

    # Then cores change hands at most now and then
    assert len(w.of(commands.Resize)) - before <= 8


def test_who_may_not_take_from_another_job_takes_from_its_own(world: Any) -> None:
    # Given two jobs with half of the cores each, the other one's command with more work left than this one's
    w = node(world, 2, "efg", e="theirs", f="mine", g="mine")
    w.exec("theirs", "e", job="theirs")
    w.tick(60.0)
    w.exec("mine", "f", job="mine")
    w.tick(100.0)

    # When a short one of this job comes
    w.exec("short", "g", job="mine")

    # Then it takes the core of its own job
    assert w.grants["short"].core_ids
    assert w.background == ["mine"]


# What cannot be taken back


def test_the_turn_of_what_cannot_be_taken_back_lasts_until_it_ends_so_that_priorities_count(world: Any) -> None:
    # Given a backlog of low priority that is older than anybody waits for a turn, none of which can be taken back
    w = node(world, 16, [f"e{n}" for n in range(320)] + ["p"])
    for number in range(320):
        w.exec(f"old{number}", f"e{number}", priority=0, preemptible=False)
    for _ in range(6):
        w.tick(5.0)
        for action_id in [*w.core.state.running]:
            w.finish(action_id, execution_s=5.0)

    # When one of high priority comes
    w.exec("urgent", "p", priority=9, preemptible=False)
    w.tick(5.0)
    for action_id in [*w.core.state.running]:
        w.finish(action_id, execution_s=5.0)

    # Then it gets one of the next cores
    assert "urgent" in w.grants


def test_cores_that_a_wide_action_waits_for_are_used_meanwhile_by_what_can_be_taken_back(world: Any) -> None:
    # Given an action that needs the whole node, and a command that may take any time and cannot be taken back
    w = node(world, 4, "ef")
    w.exec("lasting", "e", preemptible=False)
    w.run("wide", cores=4, priority=0)
    w.tick(30.0)

    # When others come
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


def test_who_waits_for_cores_only_so_long_does_not_start_without(world: Any) -> None:
    w = node(world)
    w.exec("holds", "e", preemptible=False)
    w.exec("waits", "f", queue_timeout_s=3.0)

    w.tick(4.0)

    assert w.ends["waits"].status == "timed_out"


# What is learned


def test_what_ends_in_the_background_counts_with_the_work_that_it_did_there(world: Any) -> None:
    # Given a command that ends in the background before it is told what it got there
    w = node(world, 1, "ef")
    w.exec("holds", "e", priority=9)
    w.exec("quick", "f", action_class="pytest")
    assert w.background == ["quick"]
    w.now += 0.5
    w.finish("quick", execution_s=0.4, cpu_s=0.4, waited_s=0.1)

    # Then it is work of its trajectory
    assert w.core.state.environments["f"].ended_work_s == pytest.approx(0.4)


def test_no_report_of_a_worker_makes_an_action_do_more_than_its_node_can(world: Any) -> None:
    w = node(world, 1, "ef")
    w.exec("holds", "e", priority=9)
    w.exec("back", "f")
    w.tick(2.0)

    w.used("back", 1.79e308)

    w.finish("back", execution_s=0.5, waited_s=1.5)
    assert w.core.state.environments["f"].ended_work_s <= 2.0
