"""What a refusal does to an account, to the action, and to everybody else; and how long it takes until all is as before."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.model import QuotaSpec
from scheduler.model.commands import Requeue
from scheduler.model.lifecycle import MOST_TRIES
from scheduler.quotas.answers import MOST_REFUSALS
from scheduler.quotas.throttle import DEFAULT_PAUSE_S, FLOOR, LONGEST_PAUSE_S, RISE_PER_S, Throttle


def test_the_table_of_states() -> None:
    throttle = Throttle()
    assert throttle.state(0.0) == "open"

    throttle.refused(granted_at=0.5, now=1.0, retry_after_s=2.0)
    assert (throttle.state(1.0), throttle.factor, throttle.until_s) == ("paused", 0.5, 3.0)

    throttle.refused(granted_at=0.9, now=1.5, retry_after_s=2.0)
    assert (throttle.state(1.5), throttle.factor, throttle.until_s) == ("paused", 0.5, 3.5)

    throttle.succeeded(granted_at=0.9, now=3.6)
    assert (throttle.state(3.6), throttle.factor) == ("lowered", 0.5)

    throttle.succeeded(granted_at=3.5, now=4.5)
    assert (throttle.state(4.5), throttle.factor) == ("lowered", pytest.approx(0.5 + RISE_PER_S))

    throttle.refused(granted_at=4.0, now=5.0, retry_after_s=None)
    assert (throttle.state(5.0), throttle.factor) == ("paused", pytest.approx((0.5 + RISE_PER_S) / 2))
    assert throttle.until_s == 5.0 + DEFAULT_PAUSE_S

    for second in range(7, 16):
        throttle.succeeded(granted_at=second - 0.5, now=float(second))
    assert throttle.state(16.0) == "open"


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 5), st.floats(0, 1e6)), max_size=60))
def test_the_factor_stays_between_the_floor_and_one(story: list[tuple[bool, float, float]]) -> None:
    throttle, now = Throttle(), 0.0
    for refused, gap, pause_s in story:
        now += gap
        before = throttle.factor
        if refused:
            throttle.refused(now, now, pause_s)
            assert throttle.factor <= before and throttle.until_s >= now + min(pause_s, LONGEST_PAUSE_S)
        else:
            throttle.succeeded(now, now)
            assert before <= throttle.factor <= before + RISE_PER_S
        assert FLOOR <= throttle.factor <= 1.0


def test_nothing_starts_before_retry_after_is_over_then_at_half_the_rate(world: Any) -> None:
    # Given a rate of 4 a second, and a refusal that asks for 3 seconds
    w = world(quotas=[QuotaSpec(name="web", rate_per_s=4.0, burst=3)]).node()
    w.call("a", "web", idempotent=True)
    w.tick(1.0)
    w.answer("a", 429, retry_after_s=3.0)
    w.several(w.call, "c", 3, "web")
    times = []
    while w.waiting:
        w.wake()
        times.append(w.now)
    # Then the refused one goes first when the pause is over, and all go at half the rate, without a burst
    assert w.started == ["a", "a", "c0", "c1", "c2"]
    assert times == [4.0, 4.5, 5.0, 5.5]


@pytest.mark.parametrize(
    ("status", "retry_after_s", "pauses"), [(429, None, True), (503, 5.0, True), (503, None, False), (500, 5.0, False)]
)
def test_which_answers_refuse(world: Any, status: int, retry_after_s: float | None, pauses: bool) -> None:
    w = world(quotas=[QuotaSpec(name="web", concurrency=5), QuotaSpec(name="other", concurrency=5)]).node()
    w.call("a", "web", idempotent=True)
    w.answer("a", status, retry_after_s=retry_after_s)
    w.call("b", "web")
    w.call("c", "other")
    assert ("b" in w.waiting) == pauses
    assert (w.of(Requeue) != []) == pauses
    assert "c" in w.grants


def test_an_account_without_a_rate_is_left_fewer_places(world: Any) -> None:
    w = world(quotas=[QuotaSpec(name="web", concurrency=4)]).node()
    w.several(w.call, "c", 8, "web", idempotent=True)
    w.answer("c0", 429, retry_after_s=1.0)
    for number in (1, 2, 3):
        w.finish(f"c{number}")
    w.wake()
    assert len(w.grants) == 2


def test_an_action_that_may_not_be_repeated_gets_the_refusal_as_its_answer(world: Any) -> None:
    w = world(quotas=[QuotaSpec(name="web", rate_per_s=4.0)]).node()
    w.call("post", "web")
    w.answer("post", 429, retry_after_s=1.0)
    assert w.ended("post") == ("succeeded", "")
    assert w.ends["post"].by_worker


def test_after_so_many_refusals_the_trainer_gets_the_answer(world: Any) -> None:
    w = world(quotas=[QuotaSpec(name="web", rate_per_s=4.0)]).node()
    w.call("a", "web", idempotent=True)
    tries = 0
    while "a" not in w.ends:
        if "a" not in w.grants:
            w.wake()
        w.answer("a", 429, retry_after_s=1.0)
        tries += 1
    assert tries == MOST_REFUSALS + 1
    assert w.ends["a"].status == "succeeded" and w.ends["a"].by_worker


def test_refused_tries_do_not_count_as_lost_nodes(world: Any) -> None:
    w = world(quotas=[QuotaSpec(name="web", concurrency=4)]).node("n0")
    w.call("a", "web", idempotent=True)
    for _ in range(2):
        w.answer("a", 429, retry_after_s=1.0)
        w.wake()
    # Given an action that was refused twice; when it loses its nodes
    for number in range(MOST_TRIES):
        assert "a" not in w.ends
        w.node(f"m{number}")
        w.lose(w.grants["a"].node)
    assert w.ended("a")[0] == "lost"


def test_a_refused_action_keeps_its_queue_deadline(world: Any) -> None:
    w = world(quotas=[QuotaSpec(name="web", concurrency=4)]).node()
    w.call("a", "web", idempotent=True, queue_timeout_s=2.0)
    w.answer("a", 429, retry_after_s=60.0)
    w.tick(2.0)
    assert w.ended("a")[0] == "timed_out"


def test_repeats_of_a_worker_are_charged_to_the_account(world: Any) -> None:
    w = world(quotas=[QuotaSpec(name="web", rate_per_s=1.0)]).node()
    w.call("a", "web")
    w.answer("a", 502, requests=3)
    w.call("b", "web")
    w.wake()
    assert w.now == 3.0


def test_a_refused_request_costs_no_tokens(world: Any) -> None:
    w = world(quotas=[QuotaSpec(name="llm", tokens_per_min=60.0)]).node()
    w.call("a", "llm", tokens=30, idempotent=True)
    w.answer("a", 429, retry_after_s=2.0)
    w.wake()
    assert (w.now, w.started) == (2.0, ["a", "a"])


def test_the_fleet_follows_a_server_that_lowers_its_limit_and_raises_it_again(world: Any) -> None:
    # Given a full queue at 50 a second, and a server that lets as many in within any second, but 15 from 5 s to 25 s
    w = world(quotas=[QuotaSpec(name="web", rate_per_s=50.0, margin=0.03)]).node()
    w.several(w.call, "c", 2600, "web", idempotent=True)
    let_in: list[float] = []
    refused: list[float] = []
    while w.waiting and w.now < 60.0:
        for name in list(w.grants):
            limit = 15 if 5.0 <= w.now < 25.0 else 50
            full = sum(at > w.now - 1.0 for at in let_in[-limit:]) == limit
            (refused if full else let_in).append(w.now)
            w.answer(name, 429, retry_after_s=1.0) if full else w.answer(name, 200)
        w.wake()

    def rate(begin: float, end: float) -> float:
        return sum(begin <= at < end for at in let_in) / (end - begin)

    # Then nothing is refused before, few meanwhile, none a second after; and the rates follow
    assert [at for at in refused if at < 5.0 or at > 25.0 + 1.0] == []
    assert 0 < len(refused) < 0.2 * 15 * 20
    assert rate(0, 5) > 0.95 * 50
    assert rate(10, 25) > 0.5 * 15
    assert rate(36, 40) > 0.95 * 50
    assert all(end.status == "succeeded" for end in w.ends.values())
