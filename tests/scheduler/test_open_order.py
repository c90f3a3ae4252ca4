"""Which waiting environment gets memory and start slots next: by share between jobs, in order within a job, large ones within a bound."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scheduler.core.open_order import KEPT_AFTER_S
from scheduler.model import events
from tests.scheduler.opens_run import OpensRun, Setting, Step


def opened(w: Any) -> list[str]:
    """Return the environments whose opening has begun, in order."""
    return [action_id.removeprefix("open-") for action_id in w.started if action_id.startswith("open-")]


@pytest.mark.parametrize("policy", ["elastic", "fcfs"])
def test_opens_of_a_job_alone_that_all_fit_begin_in_the_order_in_which_they_came(world: Any, policy: str) -> None:
    w = world(policy, starting_limit=1).node(memory_mb=1000)
    for number, memory_mb in enumerate((300, 10, 200, 50)):
        w.open(f"e{number}", memory_mb=memory_mb, finish=False)
    for number in range(4):
        assert opened(w) == [f"e{n}" for n in range(number + 1)]
        w.finish(f"open-e{number}")


@pytest.mark.parametrize("declared", [{"memory_mb": 10}, {}])
def test_a_thousand_opens_of_one_job_do_not_keep_that_of_another_waiting(world: Any, declared: dict[str, int]) -> None:
    # Given a job with more opens than there is memory for, or are start slots
    w = world(starting_limit=2).node(memory_mb=1000)
    w.several(w.open, "flood", 1000, job="flood", finish=False, **declared)
    assert opened(w) == ["flood0", "flood1"]
    w.open("other", job="other", finish=False, **declared)
    w.open("another", job="other", finish=False, **declared)
    # Then that is the next to begin, and from then on they take turns
    w.finish("open-flood0")
    assert opened(w)[-1] == "other"
    w.finish("open-flood1")
    assert opened(w)[-1] == "flood2"
    w.finish("open-other")
    assert opened(w)[-1] == "another"


def test_memory_that_falls_free_goes_to_the_job_that_holds_least_of_its_entitlement(world: Any) -> None:
    # Given jobs of which one has three times the weight of the other, and memory for eight environments
    w = world(weights={"heavy": 3.0}).node(memory_mb=800)
    w.several(w.open, "first", 8, job="gone", memory_mb=100)
    for number in range(8):
        w.open(f"light{number}", job="light", memory_mb=100)
        w.open(f"heavy{number}", job="heavy", memory_mb=100)
    w.several(w.close, "first", 8, finish=True)
    assert Counter(name[:5] for name in opened(w)[8:]) == {"heavy": 6, "light": 2}


def test_a_node_is_kept_for_a_large_open_against_opens_alone_until_that_is_given_up(world: Any) -> None:
    w = world().node(memory_mb=1000).open("there", memory_mb=500).open("large", memory_mb=900)
    w.tick(KEPT_AFTER_S)
    w.open("small", memory_mb=200)
    w.submit("build", "build", cost={"cores": 1, "memory_mb": 100})
    assert "small" not in opened(w) and "build" in w.grants
    w.handle(events.Cancelled(ids=("open-large",)))
    assert opened(w) == ["there", "small"]


def test_a_kept_node_that_is_lost_is_waited_for_no_more(world: Any) -> None:
    w = world().node(memory_mb=1000).open("there", memory_mb=500).open("large", memory_mb=900)
    w.tick(KEPT_AFTER_S)
    w.lose()
    w.node("small", memory_mb=100).open("other", memory_mb=100)
    assert opened(w)[-1] == "other"
    w.node("n1", memory_mb=1000)
    assert opened(w)[-1] == "large"


def test_others_may_have_what_a_large_open_will_not_need(world: Any) -> None:
    # Given a node of which 500 MB are free, kept for an open of 600
    w = world().node(memory_mb=1000).open("there", memory_mb=500).open("large", memory_mb=600)
    w.tick(KEPT_AFTER_S)
    # When small ones come, they have the 400 that it leaves over, and what falls free of those again
    w.several(w.open, "small", 5, job="other", memory_mb=100)
    assert opened(w) == ["there", *(f"small{number}" for number in range(4))]
    w.close("small2", finish=True)
    assert opened(w)[-1] == "small4"
    # Then it has its own as soon as what was there before is gone
    w.close("there", finish=True)
    assert opened(w)[-1] == "large"


def test_a_pod_that_needs_more_cores_than_fall_free_at_once_is_waited_for_no_longer_than_the_bound(world: Any) -> None:
    # Given pods on all cores of a node, and a trajectory that needs all of them
    w = world("static:2").node(cores=8)
    w.several(w.open, "e", 4)
    w.open("wide", cores=8)
    w.tick(KEPT_AFTER_S)
    for number in range(4):
        w.open(f"next{number}", finish=False)
        w.close(f"e{number}", finish=True)
    assert opened(w)[-1] == "wide"


SMALL = st.sampled_from([0, 10, 50, 100, 200, 400])
SIZES = st.sampled_from([0, 10, 100, 200, 400, 500, 600])
LARGEST = st.sampled_from([500, 600, 800, 900, 1000])


def steps(sizes: st.SearchStrategy[int], labels: st.SearchStrategy[tuple[str, ...]]) -> st.SearchStrategy[Step]:
    priorities = st.sampled_from([5, 5, 5, 6])
    return st.builds(Step, st.sampled_from("abc"), sizes, st.floats(1.0, 20.0), st.sampled_from([0.0, 0.0, 3.0]), labels, priorities)


def loops(large: st.SearchStrategy[Step]) -> st.SearchStrategy[list[tuple[Step, ...]]]:
    """Draw some loops of a small open each, and some of up to three large ones."""
    small = st.lists(st.tuples(steps(SMALL, st.just(()))), max_size=8)
    return st.builds(list.__add__, small, st.lists(st.lists(large, min_size=1, max_size=3).map(tuple), min_size=1, max_size=4))


ONE_NODE = st.tuples(st.just(((1000, ()),)), loops(steps(LARGEST, st.just(()))))
TWO_NODES = st.tuples(st.just(((1000, ()), (600, ("x",)))), loops(steps(SIZES, st.sampled_from([(), (), ("x",)]))))
WEIGHTS = st.sampled_from([0.05, 0.2, 1.0, 3.0])
SETTINGS = st.builds(
    lambda place, weights, **limits: Setting(place[0], tuple(place[1]), tuple(zip("abc", weights, strict=True)), **limits),
    ONE_NODE | TWO_NODES,
    st.tuples(WEIGHTS, WEIGHTS, WEIGHTS),
    starting_limit=st.sampled_from([1, 2, 3, 100]),
    starts_per_s=st.sampled_from([None, None, 1.0]),
    opening_s=st.sampled_from([0.0, 0.5, 3.0]),
)
"""One node and opens of up to all of its memory, or two nodes and opens that may need the label of one."""

LIGHT = Setting(
    nodes=((1000, ()),),
    loops=(
        *((Step("light", 100, life_s),) for life_s in (10.0, 13.0, 7.0)),
        (Step("light", 900, 5.0),),
        *((Step("heavy", 100, life_s),) for life_s in (9.0, 11.0)),
    ),
    weights=(("light", 0.05),),
)
"""A job is beyond its part as soon as it holds anything, and its small environments leave no room for its large one."""


@settings(max_examples=10)
@example(setting=LIGHT, policy="elastic")
@given(setting=SETTINGS, policy=st.sampled_from(["elastic", "elastic", "fcfs"]))
def test_every_open_begins_within_the_bound(world: Any, setting: Setting, policy: str) -> None:
    # Given environments that come and go in loops, of jobs with unequal weights, and more of them than there is room for
    fields = {"weights": dict(setting.weights), "starting_limit": setting.starting_limit, "starts_per_s": setting.starts_per_s}
    run = OpensRun(world(policy, **fields), setting)
    run.run(3.0 * run.bound_s)
    # Then each has waited for no longer than the claim of the module says
    assert run.late() == []


def test_a_decision_takes_no_more_calls_with_two_thousand_waiting_opens_than_with_a_hundred(world: Any) -> None:
    def crowded(count: int) -> Any:
        w = world().node(memory_mb=20_000).open("there", memory_mb=19_000)
        for number in range(count):
            w.open(f"e{number}", job=f"j{number % 10}", memory_mb=1001 + number, finish=False)
        w.tick(KEPT_AFTER_S)
        return w

    def calls(w: Any) -> int:
        """Return how often functions are called, those of C as well, while 20 decisions are made."""
        counts: Counter[str] = Counter()
        sys.setprofile(lambda _frame, what, _argument: counts.update([what]))
        try:
            for _ in range(20):
                w.tick(0.01)
        finally:
            sys.setprofile(None)
        return counts["call"] + counts["c_call"]

    assert calls(crowded(2000)) <= 2 * calls(crowded(100))


def test_a_node_holds_no_more_environments_than_it_says(world: Any) -> None:
    # Given a node that takes two, and has memory for more
    w = world().node(environments_max=2)
    for name in ("a", "b", "c", "d"):
        w.open(name, finish=False)
    assert [name for name in w.started] == ["open-a", "open-b"]
    # When another node comes, and one of the first node ends
    w.node("n1", environments_max=1)
    assert w.started[2:] == ["open-c"]
    w.finish("open-a")
    w.close("a", finish=True)
    assert w.started[-1] == "open-d" and w.grants["open-d"].node == "n0"
