"""Leases of environments: the system's, their own, renewals, and what a restarted scheduler knows of them."""

from __future__ import annotations

from typing import Any

from scheduler.model import commands, events


def test_an_environment_with_a_lease_of_its_own_is_closed_when_that_is_over_though_it_is_in_use(world: Any) -> None:
    w = world(lease_s=5.0).node().open("e", lease_s=10.0)
    w.exec("runs", "e")
    w.tick(9.0)
    assert w.states("e")[-1] == "open"
    assert w.core.next_wake(w.now) == 10.0
    w.tick(1.0)
    assert w.states("e")[-1] == "closing"
    (stop,) = w.of(commands.Stop)
    assert (stop.id, stop.cause, stop.reason) == ("runs", "lease_over", "its lease is over")


def test_a_lease_begins_when_the_environment_stands(world: Any) -> None:
    w = world().open("e", lease_s=10.0)
    w.tick(50.0)
    w.node()
    w.finish("open-e")
    w.tick(9.0)
    assert w.states("e")[-1] == "open"
    w.tick(1.0)
    assert w.states("e")[-1] == "closing"


def test_a_renewed_lease_ends_sooner_or_later_than_before(world: Any) -> None:
    w = world().node()
    for name in ("sooner", "later", "first"):
        w.open(name, lease_s=100.0)
    w.handle(events.LeaseRenewed(id="sooner", job="default", lease_s=10.0))
    w.handle(events.LeaseRenewed(id="later", job="default", lease_s=200.0))
    w.open("opening", finish=False)
    w.handle(events.LeaseRenewed(id="opening", job="default", lease_s=150.0))
    w.finish("open-opening")
    found = []
    for _ in range(4):
        w.wake()
        found.append((w.now, [one.id for one in w.of(commands.CloseEnvironment)][len(found)]))
    assert found == [(10.0, "sooner"), (100.0, "first"), (150.0, "opening"), (200.0, "later")]
    assert w.core.next_wake(w.now) is None


def test_nobody_renews_the_lease_of_another_jobs_environment_or_of_one_that_is_gone(world: Any) -> None:
    w = world().node().open("e", lease_s=10.0, job="mine")
    w.handle(events.LeaseRenewed(id="e", job="theirs", lease_s=1000.0))
    w.handle(events.LeaseRenewed(id="never", job="mine", lease_s=1000.0))
    w.tick(10.0)
    assert w.states("e")[-1] == "closing"
    w.handle(events.LeaseRenewed(id="e", job="mine", lease_s=1000.0))
    assert w.states("e")[-1] == "closing"


def test_renewals_that_waited_for_a_scheduler_arrive_before_it_ends_a_lease(world: Any) -> None:
    # Given an environment whose lease was over while no scheduler ran; a renewal of it waits
    w = world()
    w.now = 500.0
    w.node()
    w.handle(events.EnvironmentOpened(id="e", node="n0", job="default", trajectory="", used_at=0.0, ends_at=400.0))
    w.handle(events.EnvironmentOpened(id="not renewed", node="n0", job="default", trajectory="", used_at=0.0, ends_at=400.0))
    w.tick()
    w.handle(events.LeaseRenewed(id="e", job="default", lease_s=300.0))
    w.tick(60.0)
    # Then the renewal counts, and nothing else goes on for long
    assert (w.states("not renewed")[-1], w.core.state.environments["e"].state) == ("closing", "open")


def test_an_environment_of_an_id_that_is_used_again_has_a_lease_of_its_own(world: Any) -> None:
    w = world().node().open("e", lease_s=10.0)
    w.close("e", finish=True)
    w.open("e", lease_s=50.0)
    w.tick(20.0)
    assert w.states("e")[-1] == "open"
    w.tick(30.0)
    assert w.states("e")[-1] == "closing"
