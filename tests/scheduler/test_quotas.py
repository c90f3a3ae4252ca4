"""Quotas: rate, concurrency, bursts, and when the core wants to be woken for them."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.model import QuotaSpec, ServiceSpec, events


@pytest.mark.parametrize(("burst", "times"), [(None, [0.0, 0.25, 0.5, 0.75]), (3, [0.0, 0.0, 0.0, 0.25])])
def test_requests_are_evenly_spaced_but_for_a_burst_that_goes_at_once(world: Any, burst: int | None, times: list[float]) -> None:
    w = world(quotas=[QuotaSpec(name="web", rate_per_s=4.0, burst=burst)]).node()
    w.several(w.call, "c", 4, "web")
    seen = [w.now] * len(w.started)
    while w.waiting:
        w.wake()
        seen += [w.now] * (len(w.started) - len(seen))
    assert seen == times
    assert w.started == ["c0", "c1", "c2", "c3"]
    assert w.core.next_wake(w.now) is None


def test_a_lost_node_gives_its_places_back(world: Any) -> None:
    w = world(quotas=[QuotaSpec(name="web", concurrency=1)]).node("n0")
    w.call("a", "web")
    w.call("b", "web")
    w.node("n1")
    w.lose("n0")
    assert w.grants["b"].node == "n1"


def test_a_request_of_a_silent_node_keeps_its_place_until_the_node_is_lost(world: Any) -> None:
    # Given an account with one place, taken by a request that may run again; when its node is silent, it may still be under way
    w = world(quotas=[QuotaSpec(name="web", concurrency=1)]).node("n0")
    w.call("a", "web", idempotent=True)
    w.call("b", "web")
    w.node("n1")
    w.handle(events.NodeSilent(name="n0", reason="quiet"))
    # Then no other request goes out, and once the node is lost it runs again
    assert w.grants["a"].node == "n0" and w.waiting == ["b"]
    w.lose("n0")
    assert w.grants["a"].node == "n1" and w.waiting == ["b"]


def test_requests_go_to_the_node_that_runs_the_fewest_actions(world: Any) -> None:
    w = world(quotas=[QuotaSpec(name="web")]).node("n0").node("n1").node("n2", pools=("cpu",))
    w.several(w.call, "c", 4, "web")
    assert [w.grants[f"c{number}"].node for number in range(4)] == ["n0", "n1", "n0", "n1"]


def test_an_action_that_draws_on_two_quotas_waits_for_both(world: Any) -> None:
    w = world(quotas=[QuotaSpec(name="a", concurrency=1), QuotaSpec(name="b", concurrency=1)]).node()
    w.call("first", "b")
    w.call("both", "a", "b")
    w.call("other", "a")
    assert w.started == ["first", "other"]
    w.finish("first")
    assert w.waiting == ["both"]
    w.finish("other")
    assert "both" in w.grants


def test_an_amount_of_requests_counts_as_so_many(world: Any) -> None:
    w = world(quotas=[QuotaSpec(name="web", concurrency=3)]).node()
    w.submit("two", "batch", cost={"quota:web": 2})
    w.submit("again", "batch", cost={"quota:web": 2})
    assert w.waiting == ["again"]
    w.finish("two")
    assert "again" in w.grants


def test_a_model_can_draw_on_a_quota_too(world: Any) -> None:
    for policy in ("elastic", "static:1"):
        w = world(policy, quotas=[QuotaSpec(name="tokens", concurrency=1)], services=[ServiceSpec(name="rm", max_concurrency=4)])
        w.node(cells=1)
        for name in ("a", "b"):
            w.submit(name, "gpu.score", service="rm", cost={"quota:tokens": 1})
        assert w.started == ["a"]
        w.finish("a")
        assert w.started == ["a", "b"]


def test_what_has_less_lead_than_others_does_not_have_the_core_woken_for_ever(world: Any) -> None:
    # Given an action on cores that waits for one request, and a call, which may be granted ahead of its time, that waits for five
    w = world("fcfs", quotas=[QuotaSpec(name="web", rate_per_s=1.0, burst=5, lead_s=2.0)]).node()
    w.several(w.call, "c", 5, "web")
    w.submit("build", "build", cost={"cores": 1, "quota:web": 1})
    w.submit("large", "api.call", cost={"quota:web": 5})
    assert w.waiting == ["build", "large"]
    # When the core is woken as it asks for
    w.wake()
    # Then that is when one of them can go
    assert (w.now, w.waiting) == (1.0, ["large"])
    w.wake()
    assert (w.now, w.waiting, w.grants["large"].not_before) == (4.0, [], 6.0)
    assert w.core.next_wake(w.now) is None


@pytest.mark.parametrize("policy", ["elastic", "fcfs", "paper", "fixed:1"])
def test_cores_are_not_kept_for_an_action_whose_quota_one_before_it_has_taken(world: Any, policy: str) -> None:
    w = world(policy, quotas=[QuotaSpec(name="web", concurrency=1)]).node(cores=2)
    w.run("whole", cores=2)
    for name in ("first", "second"):
        w.submit(name, "build", cost={"cores": 1, "quota:web": 1})
    w.run("plain")
    w.finish("whole")
    # Then the second is kept back by the quota, and who comes after it has the core
    assert w.waiting == ["second"]
    assert sorted(w.grants) == ["first", "plain"]
    w.finish("first")
    assert "second" in w.grants
