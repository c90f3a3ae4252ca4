"""Who goes first, and who holds up whom."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.model import QuotaSpec


@pytest.mark.parametrize("policy", ["paper", "fcfs", "fixed:1"])
def test_a_large_action_at_the_head_is_not_overtaken(world: Any, policy: str) -> None:
    w = world(policy).node(cores=2)
    w.run("first")
    w.run("large", 2)
    w.run("small")
    assert w.waiting == ["large", "small"]
    w.finish("first")
    assert w.started == ["first", "large"]


def test_higher_priority_goes_first_under_elastic_and_not_under_fcfs(world: Any) -> None:
    for policy, order in (("elastic", ["a", "urgent", "b"]), ("fcfs", ["a", "b", "urgent"])):
        w = world(policy).node(cores=1)
        w.run("a")
        w.run("b")
        w.run("urgent", priority=9)
        while w.grants:
            w.finish(next(iter(w.grants)))
        assert w.started == order


def test_what_only_a_larger_node_can_run_does_not_block_a_smaller_one(world: Any) -> None:
    w = world().node("large", cores=8)
    w.run("busy", 8)
    w.node("small", cores=2)
    w.run("needs-large", 4)
    w.run("fits-small", 1)
    assert w.grants["fits-small"].node == "small"
    assert w.waiting == ["needs-large"]


def test_labels_restrict_where_an_action_runs(world: Any) -> None:
    w = world(quotas=[QuotaSpec(name="web")]).node("plain").node("special", labels=frozenset({"docker", "ssd"}))
    w.run("a", requires=("docker",))
    w.open("e0", requires=("docker", "ssd"), finish=False)
    w.run("b", requires=("tpu",))
    assert w.grants["a"].node == w.grants["open-e0"].node == "special"
    assert w.ended("b") == ("rejected", "no node has the labels tpu")
    w.call("c", "web", requires=("proxy",))
    assert w.ended("c") == ("rejected", "no node has the labels proxy")


def test_an_action_without_needs_starts_anywhere_and_waits_only_for_a_node(world: Any) -> None:
    w = world()
    w.submit("a", "note")
    assert w.waiting == ["a"]
    w.node(cores=1)
    assert w.grants["a"].core_ids == ()


@pytest.mark.parametrize(
    ("cost", "reason"),
    [
        ({"cores": 9}, "needs 9 cores, the largest node has 8"),
        ({"memory_mb": 2000}, "needs 2000 MB, the largest node has 1000 MB"),
        ({"cores": 1, "quota:web": 1}, "quota 'web' is not declared"),
        ({"cores": 1, "cells": 1}, "asks for cores and for GPU cells; one action is granted only one of them"),
    ],
)
def test_what_could_never_run_is_rejected_at_once(world: Any, cost: dict[str, int], reason: str) -> None:
    w = world().node(memory_mb=1000)
    w.submit("a", "build", cost=cost)
    assert w.ended("a") == ("rejected", reason) and w.ends["a"].cause in ("impossible", "bad_input")


def test_a_job_with_too_many_waiting_is_rejected_and_others_are_not(world: Any) -> None:
    w = world(queue_limit=2).node(cores=1)
    w.several(w.run, "a", 4, job="greedy")
    w.run("b", job="modest")
    assert w.ended("a3") == ("rejected", "job greedy has 2 actions waiting already") and w.ends["a3"].cause == "queue_full"
    assert w.waiting == ["a1", "a2", "b"]


def test_a_full_queue_never_keeps_a_trainer_from_closing_its_environment(world: Any) -> None:
    w = world(queue_limit=1).node(cores=1).open("e0")
    w.run("busy")
    w.run("waits")
    w.close("e0")
    assert "close-e0" in w.grants


def test_a_queue_deadline_ends_what_still_waits_makes_way_and_leaves_what_runs(world: Any) -> None:
    # Given one that runs on a core of two, and one that needs both, each with a deadline, and another one behind
    w = world("fcfs").node(cores=2)
    w.run("runs", queue_timeout_s=5.0)
    w.run("waits", 2, queue_timeout_s=5.0)
    w.run("behind")
    assert w.waiting == ["waits", "behind"]
    w.wake()
    assert w.now == 5.0
    assert w.ended("waits") == ("timed_out", "waited longer than queue_timeout_s = 5.0") and w.ends["waits"].cause == "queue_timeout"
    assert w.ends["waits"].queue_s == 5.0
    assert {"runs", "behind"} <= set(w.grants)
