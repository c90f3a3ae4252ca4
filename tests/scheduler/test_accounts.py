"""Accounts: tokens, quotas that share one, what answers correct, and what a restart still knows."""

from __future__ import annotations

import heapq
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.model import Grant, QuotaSpec, events
from scheduler.quotas.account import Account
from tangram.action import Action, Cost


@pytest.mark.parametrize(("declared", "real"), [(0, 20), (30, 3)], ids=["more", "less"])
def test_who_comes_after_an_answer_waits_for_the_tokens_that_it_really_cost(world: Any, declared: int, real: int) -> None:
    # Given an action whose answer, which comes at once, cost other tokens than it declared
    w = world(quotas=[QuotaSpec(name="llm", tokens_per_min=60.0)]).node()
    w.call("first", "llm", tokens=declared)
    w.answer("first", 200, tokens=real)
    w.call("second", "llm")
    assert w.waiting == ["second"]
    w.wake()
    assert (w.now, w.started) == (real, ["first", "second"])


@pytest.mark.parametrize(
    ("quota", "cost", "reason"),
    [
        ({"tokens_per_min": 60.0}, {"quota:web": (1,), "tokens:web": (61,)}, "needs 61 tokens, quota 'web' allows 60 a minute"),
        ({"rate_per_s": 2.0, "burst": 200}, {"quota:web": (10**9,)}, "needs 1000000000 requests, quota 'web' allows 120 a minute"),
        ({"concurrency": 3}, {"quota:web": (4,)}, "needs 4 requests at once, quota 'web' allows 3"),
        ({"rate_per_s": 2.0, "burst": 200}, {"quota:web": (200,)}, ""),
    ],
    ids=["tokens", "requests", "at once", "a burst"],
)
def test_an_amount_beyond_what_the_quota_ever_allows_is_refused(world: Any, quota: Any, cost: Any, reason: str) -> None:
    w = world(quotas=[QuotaSpec(name="web", **quota)]).node()
    w.submit("a", "batch", cost=cost)
    assert "a" in w.grants if not reason else w.ended("a") == ("rejected", reason)


def test_quotas_of_one_account_share_its_places_and_its_order(world: Any) -> None:
    # Given two quotas of one account with one place, and a third on its own
    shared = {"account": "acme", "concurrency": 1}
    w = world(quotas=[QuotaSpec(name="chat", **shared), QuotaSpec(name="embed", account="acme"), QuotaSpec(name="web", concurrency=1)])
    w.node()
    w.call("first", "chat")
    w.call("low", "chat", priority=1)
    w.call("high", "embed", priority=9)
    w.call("other", "web")
    # Then the place goes by priority across quotas, and the other account is not disturbed
    assert w.started == ["first", "other"]
    w.finish("first")
    assert w.started[2:] == ["high"]
    w.finish("high")
    assert w.started[3:] == ["low"]


@pytest.mark.parametrize(("burst", "lead_s"), [(None, 0.05), (None, 0.0), (4, 0.0)])
@given(gaps=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=60), margin=st.sampled_from([0.0, 0.03]))
def test_sending_times_keep_the_rate_and_one_burst_however_late_grants_are(
    burst: int | None, lead_s: float, gaps: list[float], margin: float
) -> None:
    quota = Account(QuotaSpec(name="web", rate_per_s=5.0, burst=burst, margin=margin, lead_s=lead_s), {})
    now, sent = 0.0, []
    for gap in gaps:
        now += gap
        while quota.opens_at(now, 1, lead_s) == now:
            sent.append(quota.goes_at(now))
            quota.take(sent[-1])
            quota.give_back()
    for first, start in enumerate(sent):
        for count, end in enumerate(sent[first:], start=1):
            assert count <= (burst or 1) + 5.0 * (1 - margin) * (end - start) + 1e-6


@given(late=st.lists(st.floats(0.0, 0.4), min_size=60, max_size=60), told_s=st.floats(0.0, 0.2), burst=st.sampled_from([None, 3]))
@pytest.mark.parametrize("margin", [0.0, 0.1])
def test_no_window_sees_more_however_late_requests_go_out(late: list[float], told_s: float, burst: int | None, margin: float) -> None:
    # Given 10 requests a second, granted 0.15 s ahead, which go out late, of which the scheduler hears a little later still
    quota = Account(QuotaSpec(name="web", rate_per_s=10.0, burst=burst, lead_s=0.15, margin=margin), {})
    now, out, untold = 0.0, list[float](), list[tuple[float, float, float]]()
    for late_s in late:
        while (opens := quota.opens_at(now, 1, 0.15)) != now:
            assert opens is not None
            now = min(opens, untold[0][0]) if untold else opens
            while untold and untold[0][0] <= now:
                _, planned, went = heapq.heappop(untold)
                quota.went_out(planned, went, 1)
        planned = quota.goes_at(now)
        quota.take(planned)
        out.append(planned + late_s)
        heapq.heappush(untold, (out[-1] + told_s, planned, out[-1]))
    # Then no second, with the margin that is left, sees more than ten, and the burst
    out.sort()
    for first, start in enumerate(out):
        assert sum(at - start < 1.0 / (1.0 - margin) - 1e-6 for at in out[first:]) <= 10 + (burst or 1) - 1


def test_a_stall_longer_than_the_window_is_not_forgotten(world: Any) -> None:
    # Given 4 requests a second, of which the first three go out together only when five seconds have passed, and are told of twice
    w = world(quotas=[QuotaSpec(name="web", rate_per_s=4.0)]).node()
    w.several(w.call, "c", 30, "web")
    while w.now < 5.0:
        w.wake()
    before = len(w.started)
    for name in ("c0", "c1", "c2") * 2:
        w.handle(events.Sent(id=name, attempt=1, at=5.0))
    # When the rest is granted, then within the second after that they count
    while w.now < 5.99:
        w.wake()
    assert before + 1 <= len([at for at in w.started]) <= before + 2
    w.wake()
    w.wake()
    assert len(w.started) >= before + 3


def test_a_request_that_went_out_late_keeps_back_those_a_window_later(world: Any) -> None:
    # Given 2 requests a second, the first of which goes out 0.3 s after its grant
    w = world(quotas=[QuotaSpec(name="web", rate_per_s=2.0)]).node()
    w.several(w.call, "c", 4, "web")
    w.now = 0.3
    w.handle(events.Sent(id="c0", attempt=1, at=0.3))
    # When the others are granted; then the third waits until a second after the first, and what is no news changes nothing
    w.wake()
    assert (w.now, w.started) == (0.5, ["c0", "c1"])
    w.handle(events.Sent(id="c1", attempt=1, at=0.5))
    w.handle(events.Sent(id="c1", attempt=2, at=9.0))
    w.handle(events.Sent(id="nobody", attempt=1, at=9.0))
    w.wake()
    assert (w.now, len(w.started)) == (1.3, 3)


@given(costs=st.lists(st.tuples(st.integers(0, 30), st.floats(0.0, 20.0)), min_size=1, max_size=40))
def test_no_stretch_of_time_sees_more_than_its_tokens_and_one_actions(costs: list[tuple[int, float]]) -> None:
    quota = Account(QuotaSpec(name="llm", tokens_per_min=60.0), {})
    now, taken = 0.0, []
    for tokens, gap in costs:
        now += gap
        at = quota.opens_at(now)
        assert at is not None
        now = max(now, at)
        quota.take(now, 1, tokens)
        taken.append((now, tokens))
    for first, (start, _) in enumerate(taken):
        for last in range(first, len(taken)):
            end, newest = taken[last]
            assert sum(tokens for _, tokens in taken[first:last]) <= end - start + 1e-6, newest


@pytest.mark.parametrize(("burst", "ended", "runs"), [(None, [9.5], []), (None, [9.0], [9.5]), (3, [9.5, 9.5], [9.5])])
def test_a_restart_does_not_double_the_rate(world: Any, burst: int | None, ended: list[float], runs: list[float]) -> None:
    # Given 2 requests a second, and a journal that tells of some which have ended, and of others that still run
    w = world(quotas=[QuotaSpec(name="web", rate_per_s=2.0, burst=burst)])
    w.now = 9.7
    w.node()
    call, before = Action(kind="api.call", cost=Cost({"quota:web": (1,)})), {"submitted_at": 0.0, "received_at": 0.0}
    for at in ended:
        w.handle(events.Spent(action=call, at=at))
    for at in runs:
        w.handle(events.Resumed(id="c", action=call, granted_at=at, grant=Grant(node="n0"), **before))
    # When more come; then they go when they would have gone without a restart
    w.several(w.call, "d", 2, "web")
    for count, at in enumerate((10.0, 10.5), 1):
        w.wake()
        assert (w.now, w.started) == (at, [f"d{number}" for number in range(count)])
