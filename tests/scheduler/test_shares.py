"""Fairness between jobs: what each holds and may hold."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.model.events import Holdings
from scheduler.model.shares import TOLERANCE, Shares


def shares_of(weights: dict[str, float] | None = None, **actions: int) -> Shares:
    shares = Shares(weights or {})
    shares.offer("cores", 100)
    shares.offer("cells", 10)
    for job, count in actions.items():
        for _ in range(count):
            shares.enter(job)
    return shares


def test_a_job_is_over_only_beyond_the_tolerance_and_while_others_are_active() -> None:
    shares = shares_of(a=2, b=1)
    shares.hold("a", "cores", 50 * TOLERANCE - 1)
    assert not shares.over("a")
    shares.hold("a", "cores", 1)
    assert shares.over("a")
    shares.leave("b")
    assert not shares.over("a")
    assert shares.entitlement("a") == 1.0


def test_a_job_that_has_given_all_back_has_a_share_of_nothing() -> None:
    shares = shares_of(a=1)
    shares.hold("a", "cells", 5)
    assert shares.dominant_of("a") == (0.5, "cells")
    shares.hold("a", "cells", -5)
    assert shares.dominant_of("a") == (0.0, "")


def test_entitlements_go_by_weight_among_those_that_are_active() -> None:
    shares = shares_of({"a": 3.0}, a=1, b=1)
    assert (shares.entitlement("a"), shares.entitlement("b")) == (0.75, 0.25)
    shares.enter("c")
    assert shares.entitlement("a") == 0.6
    shares.leave("a")
    assert shares.entitlement("b") == 0.5


@pytest.mark.parametrize(("without", "first"), [([], "few"), (["shares"], "many4")], ids=["shares", "no shares"])
def test_a_job_within_its_share_goes_before_one_beyond_it_that_came_first(world: Any, without: list[str], first: str) -> None:
    w = world(without=without).node(cores=4)
    w.several(w.run, "many", 6, job="many")
    w.run("few", job="few")
    w.finish("many0")
    # Then that one goes first; without shares it waits its turn
    assert w.started[-1] == first


def test_a_job_beyond_its_share_takes_extra_units_of_its_own_and_of_nobody_within_theirs(world: Any) -> None:
    # Given a full node, on which a job beyond its share and one within each have an extra unit
    w = world().node(cores=8)
    w.run("light", [1, 2], parallel=0.5, work_s=100.0, job="light")
    w.run("own", [1, 2], parallel=0.99, work_s=100.0, job="heavy")
    w.run("fixed", 4, job="heavy")
    assert w.units == {"light": 2, "own": 2, "fixed": 4}
    # When it wants more, it gets its own back, although that is worth more; then it waits
    w.run("more", 1, job="heavy")
    assert w.units == {"light": 2, "own": 1, "fixed": 4, "more": 1}
    w.run("still-more", 1, job="heavy")
    assert w.waiting == ["still-more"]


def test_a_job_that_waits_for_a_whole_node_holds_up_nobody_else_at_first(world: Any) -> None:
    # Given a node on which one job has a core and wants all of them
    w = world(window_s=30.0).node(cores=8)
    w.run("long", 1, job="wide")
    w.run("all", 8, job="wide")
    w.run("short", 1, job="narrow")
    assert "short" in w.grants
    # But after a window, those that come wait for the one that has waited for so long
    w.tick(31.0)
    w.run("later", 1, job="narrow")
    assert w.waiting == ["all", "later"]


@pytest.mark.parametrize(("without", "gets_its_share"), [([], True), (["shares"], False)], ids=["shares", "no shares"])
def test_a_job_within_its_share_has_a_claim_on_extra_units_of_one_beyond_its(world: Any, without: list[str], gets_its_share: bool) -> None:
    # Given a job that has grown over the whole node, with actions to which units are worth more than to anybody
    w = world(without=without).node(cores=12)
    w.several(w.run, "wide", 3, [1, 2, 3, 4], parallel=0.999, work_s=1000.0, job="many")
    assert set(w.units.values()) == {4}
    # When one comes of another job that scales badly; then it grows as far as its job is entitled to
    w.run("build", [1, 2, 4, 8], parallel=0.6, work_s=1000.0, job="few")
    assert (w.units["build"] == 4) == gets_its_share


def test_what_jobs_hold_elsewhere_counts_and_is_not_said_again() -> None:
    shares = shares_of(a=1, b=1)
    shares.hold("a", "cores", 40)
    own = {"offered": {"cores": 100, "cells": 10}, "held": {"a": {"cores": 40}, "b": {}}}
    assert shares.own(10) == own and not shares.over("a")
    # Given another shard as large, where one job holds most and a third one is active
    for cores in (30, 90, 80):
        shares.set_elsewhere(Holdings(offered={"cores": 100}, held={"a": {"cores": cores}, "c": {}}))
    # Then the job has 120 of 200, and a third of them is its own by right
    assert shares.dominant("a") == 0.6 and shares.entitlement("a") == pytest.approx(1 / 3) and shares.over("a")
    assert shares.own(10) == own and shares.own(1)["held"] == {"a": {"cores": 40}}
    # And once it has ended here, only what it holds there counts
    shares.hold("a", "cores", -40)
    shares.leave("a")
    assert shares.dominant("a") == 0.4 and shares.own(10)["held"] == {"b": {}}
    shares.set_elsewhere(Holdings())
    assert (list(shares.active()), shares.dominant("a"), shares.entitlement("b")) == (["b"], 0.0, 1.0)
