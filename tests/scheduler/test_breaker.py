"""The circuit breaker: a job whose actions keep failing by our fault is held back, and tried again with growing pauses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scheduler.core.breaker import LONGEST_PAUSE_S, SHORTEST_PAUSE_S, TOGETHER_S, WINDOW_S
from scheduler.model import QuotaSpec, ServiceSpec, events

OURS = {"status": "failed", "cause": "sandbox_failed"}
PROGRAMS = {"status": "timed_out", "cause": "timeout"}


@pytest.fixture
def unwell(world: Callable[..., Any]) -> Any:
    """Return a world of which a job is held back, by as few ends as can be: one fault of four ends."""
    w = world(breaker_share=0.2, breaker_least=4).node(cores=16)
    ends(w, {}, {}, {}, OURS)
    return w


def ends(w: Any, *how: dict[str, Any]) -> None:
    """Have actions run and end, one after the other."""
    for number, end in enumerate(how):
        w.run(f"a{number}")
        w.finish(f"a{number}", **end)


def trial(w: Any, *ids: str) -> str:
    """Let time pass until one of these actions is let in; return its id."""
    w.wake()
    (id,) = [id for id in ids if id in w.grants]
    return id


def tried_after_s(w: Any, *ids: str) -> float:
    """Let time pass until one of these actions is let in; return how much."""
    began = w.now
    trial(w, *ids)
    return float(w.now - began)


def test_opens_and_actions_of_a_held_job_wait_and_are_let_in_one_by_one(unwell: Any) -> None:
    # When more comes of the job, and of another one
    unwell.open("e0")
    unwell.run("a4")
    unwell.score("s0", "unheard-of")
    unwell.run("b0", job="other")
    # Then what is of the job waits, whatever is free, and the other job goes on
    assert unwell.started[4:] == ["b0"]
    # And after a pause one that is like what failed is tried, and after another one the first of all, while that has not ended
    assert tried_after_s(unwell, "a4") == tried_after_s(unwell, "open-e0") == SHORTEST_PAUSE_S


def test_what_was_queued_before_is_held_back_too(world: Any) -> None:
    w = world(breaker_share=0.2, breaker_least=1, starting_limit=1).node(cores=1)
    w.run("a0")
    w.run("a1")
    w.open("e0", finish=False)
    w.open("e1", finish=False)
    w.finish("a0", **OURS)
    assert w.started == ["a0", "open-e0"]
    w.finish("open-e0")
    assert w.started == ["a0", "open-e0"]
    w.finish(trial(w, "a1", "open-e1"))
    assert w.waiting == []


def test_requests_to_outside_apis_are_neither_counted_nor_held_back(world: Callable[..., Any]) -> None:
    w = world(quotas=(QuotaSpec(name="web", concurrency=8),), breaker_share=0.2, breaker_least=2).node()
    for number in range(3):
        w.call(f"q{number}", "web")
        w.finish(f"q{number}", "failed", cause="api_failed")
    w.run("a0")
    assert "a0" in w.grants
    w.run("a1")
    w.finish("a0", **OURS)
    w.finish("a1", **OURS)
    w.run("a2")
    w.call("q3", "web")
    assert "a2" not in w.grants and "q3" in w.grants


def test_commands_of_open_environments_and_closes_go_on(world: Any) -> None:
    w = world(breaker_share=0.2, breaker_least=1).node(cores=2).open("e0")
    ends(w, OURS)
    w.exec("c0", "e0")
    w.close("e0")
    assert "close-e0" in w.grants


@pytest.mark.parametrize(
    ("end", "goes_on"),
    [({}, True), (PROGRAMS, True), (OURS, False), ({"status": "cancelled", "cause": "cancelled"}, False)],
    ids=["well", "program", "ours", "cancelled"],
)
def test_a_trial_lets_the_job_go_on_unless_its_end_was_our_fault_or_says_nothing(unwell: Any, end: dict[str, Any], goes_on: bool) -> None:
    unwell.several(unwell.run, "a", range(4, 8))
    first = trial(unwell, "a4", "a5", "a6", "a7")
    unwell.finish(first, **end)
    assert len(unwell.waiting) == (0 if goes_on else 3)


def test_pauses_double_with_each_trial_that_fails_by_our_fault(unwell: Any) -> None:
    unwell.several(unwell.run, "a", range(4, 11))
    pauses = []
    for _ in range(6):
        pauses.append(tried_after_s(unwell, *unwell.waiting))
        unwell.finish(unwell.started[-1], **OURS)
    assert pauses == [SHORTEST_PAUSE_S, 10.0, 20.0, 40.0, LONGEST_PAUSE_S, LONGEST_PAUSE_S]


@pytest.mark.parametrize(("well_s", "pause_s"), [(0.0, 2 * SHORTEST_PAUSE_S), (LONGEST_PAUSE_S, SHORTEST_PAUSE_S)])
def test_pauses_begin_anew_only_where_the_job_was_well_for_long(unwell: Any, well_s: float, pause_s: float) -> None:
    unwell.run("a4")
    unwell.finish(trial(unwell, "a4"))
    unwell.tick(well_s)
    unwell.several(unwell.run, "a", range(5, 9))
    unwell.several(unwell.finish, "a", range(5, 9), **OURS)
    unwell.run("a9")
    assert tried_after_s(unwell, "a9") == pause_s


@pytest.mark.parametrize(
    ("how", "share", "held"),
    [
        ([OURS] * 3, 0.2, False),  # too few
        ([OURS] + [{}] * 4, 0.2, False),  # no more than the share
        ([{}] * 2 + [OURS] * 2, 0.2, True),
        ([OURS] * 30, 1.0, False),
        ([PROGRAMS] * 4, 0.2, False),
        ([{"status": "cancelled", "cause": "cancelled"}] * 4, 0.2, False),
    ],
    ids=["few", "share", "ours", "never", "program", "caller"],
)
def test_a_job_is_held_back_by_its_share_of_our_faults_among_enough_ends(
    world: Any, how: list[dict[str, Any]], share: float, held: bool
) -> None:
    w = world(breaker_share=share, breaker_least=4).node(cores=16)
    ends(w, *how)
    w.run("next")
    assert ("next" not in w.grants) == held


def test_ends_count_for_a_minute(world: Any) -> None:
    w = world(breaker_share=0.2, breaker_least=4).node(cores=16)
    for number in range(4):
        w.run(f"a{number}")
        w.finish(f"a{number}", **OURS if number < 3 else {})
        w.tick(WINDOW_S / 2 if number == 2 else 0.0)
    w.tick(WINDOW_S / 2)
    w.run("a4")
    w.finish("a4", **OURS)
    w.run("next")
    assert "next" in w.grants


def test_actions_that_are_lost_with_their_node_count_as_one(world: Any) -> None:
    w = world(breaker_share=0.2, breaker_least=4).node(cores=16).node("n1", cores=1)
    w.several(w.run, "a", 8, cores=2)
    w.run("b", cores=1)
    w.lose("n0")
    assert [w.ended(f"a{number}")[0] for number in range(8)] == ["lost"] * 8
    w.run("c")
    w.finish("b")
    assert "c" in w.grants


def test_environments_that_die_together_count_as_one(world: Any) -> None:
    # Given an engine that restarts, whose environments die one after the other within a moment
    w = world(breaker_share=0.2, breaker_least=4).node(cores=16)
    for number in range(8):
        w.open(f"e{number}")
        w.exec(f"c{number}", f"e{number}")
    w.tick(WINDOW_S)
    for number in range(8):
        w.now += 0.01
        w.finish(f"c{number}", "lost", cause="environment_lost")
    w.run("next")
    assert "next" in w.grants
    # But those that go on to die count one by one
    for number in range(2):
        w.open(f"f{number}")
        w.exec(f"d{number}", f"f{number}")
        w.tick(TOGETHER_S)
        w.finish(f"d{number}", "lost", cause="environment_lost")
    w.run("last")
    assert "last" not in w.grants


def test_what_is_held_back_can_be_given_up(unwell: Any) -> None:
    unwell.run("a4", queue_timeout_s=2.0)
    unwell.open("e0")
    unwell.exec("c0", "e0")
    unwell.run("a5")
    unwell.tick(2.0)
    assert unwell.ended("a4")[0] == "timed_out"
    unwell.close("e0")
    assert (unwell.ended("open-e0")[0], unwell.ended("close-e0")[0]) == ("cancelled", "succeeded")
    unwell.handle(events.Cancelled(ids=("a5",)))
    assert unwell.ended("a5")[0] == "cancelled"
    # With nothing left, the job is not held back any more after the pause
    unwell.tick(SHORTEST_PAUSE_S)
    unwell.run("a6")
    unwell.run("a7")
    assert {"a6", "a7"} <= set(unwell.grants)


def test_an_open_that_is_tried_may_go_to_another_node(world: Any) -> None:
    w = world(breaker_share=0.2, breaker_least=1).node("n0").node("n1")
    ends(w, OURS)
    w.open("e0", finish=False)
    w.open("e1", finish=False)
    trial(w, "open-e0")
    first = w.grants["open-e0"].node
    w.finish("open-e0", "failed", cause="sandbox_failed", waits_again=True)
    assert w.grants["open-e0"].node != first
    w.finish("open-e0")
    assert "open-e1" in w.grants


def test_a_trial_is_like_what_failed_if_such_a_one_waits(world: Callable[..., Any]) -> None:
    # Given a sick service, and an open that came before its calls
    w = world(services=(ServiceSpec(name="rm", memory_mb=1),), breaker_share=0.2, breaker_least=1).node(cells=1, cell_memory_mb=10)
    w.score("s0", "rm")
    w.finish("s0", **OURS)
    w.open("e0", finish=False)
    w.score("s1", "rm")
    assert trial(w, "open-e0", "s1") == "s1"


def test_trials_without_a_place_keep_no_others_from_being_tried(world: Any) -> None:
    # Given many actions for a node that drains, before one for any node
    w = world(breaker_share=0.2, breaker_least=1).node(labels=frozenset({"big"})).node("n1")
    ends(w, OURS)
    w.handle(events.NodeDrained(name="n0", draining=True))
    w.several(w.run, "big", 20, requires=("big",))
    w.run("a1")
    # When the first has been let in, and waits; then another one is tried
    w.wake()
    assert tried_after_s(w, "a1") == SHORTEST_PAUSE_S


def test_trials_that_are_lost_together_have_failed_once(unwell: Any) -> None:
    unwell.several(unwell.run, "a", range(4, 9))
    assert [tried_after_s(unwell, *unwell.waiting) for _ in range(3)] == [SHORTEST_PAUSE_S] * 3
    unwell.lose("n0")
    unwell.node("n1")
    assert tried_after_s(unwell, "a7") == 2 * SHORTEST_PAUSE_S


def test_a_breaker_that_closes_and_opens_again_at_once_holds_all_back_once(world: Callable[..., Any]) -> None:
    # Given two trials, and two actions that are held back
    w = world(breaker_share=0.2, breaker_least=1).node(cores=16)
    ends(w, OURS)
    w.several(w.run, "a", range(1, 5))
    assert [trial(w, "a1"), trial(w, "a2")] == ["a1", "a2"]
    # When their node is lost, on which the first trial has ended well
    w.handle(events.NodeLost(name="n0", reason="it burned", ended=(events.StoredEnd(id="a1", status="succeeded"),)))
    w.node("n1", cores=16)
    # Then the two still wait, and each starts once
    assert w.waiting == ["a3", "a4"]
    w.finish(trial(w, "a3"))
    assert w.started[3:] == ["a3", "a4"]
