"""Environments: placement, parking, sessions, closing, leases, starting caps."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.core.gone_environments import REMEMBERED
from scheduler.model import QuotaSpec, commands, events


def test_environments_go_where_few_stand_per_core(world: Any) -> None:
    w = world().node("small", cores=4).node("large", cores=8)
    w.several(w.open, "e", 6, finish=False)
    placed = [w.grants[f"open-e{number}"].node for number in range(6)]
    assert placed.count("large") == 4
    assert placed.count("small") == 2


def test_memory_of_an_action_comes_back_to_an_environment_that_waits_for_it(world: Any) -> None:
    w = world().node(memory_mb=1000)
    w.submit("a", "build", cost={"cores": 1, "memory_mb": 800})
    w.open("e0", memory_mb=800, finish=False)
    assert w.waiting == ["open-e0"]
    w.finish("a")
    assert "open-e0" in w.grants


def test_actions_for_an_environment_that_is_no_longer_there_are_told_how_it_ended(world: Any) -> None:
    # Given environments that were closed when their lease was over, closed by their trainer, cancelled, and never opened
    w = world(lease_s=60.0).node().open("unused")
    w.tick(60.0)
    w.exec("during", "unused")
    w.beat()
    w.open("closed")
    w.open("cancelled", trajectory="t")
    w.close("closed", finish=True)
    w.handle(events.Cancelled(job="default", trajectory="t"))
    w.beat()
    # When actions on them come later
    w.now += 5.0
    for environment in ("closed", "unused", "cancelled", "unheard-of"):
        w.exec(environment, environment)
    assert w.ended("closed") == ("failed", "environment closed was closed 5 s ago: its trainer closed it")
    assert w.ended("unused") == ("failed", "environment unused was closed 5 s ago: unused for 60 s")
    assert w.ended("cancelled") == ("failed", "environment cancelled was closed 5 s ago: cancelled by the trainer")
    assert w.ended("unheard-of") == ("failed", "environment unheard-of is unknown: it was never opened, or ended long ago")
    assert not any(end.environment_lost_on for end in w.ends.values())
    assert (w.ends["during"].cause, w.ends["unused"].cause) == ("lease_over", "lease_over")


def test_lost_environments_are_remembered_however_many_are_closed(world: Any) -> None:
    w = world().node()
    w.handle(events.EnvironmentGone(id="lost", state="lost", node="n9", reason="node n9 was lost: it burned", at=0.0))
    for number in range(REMEMBERED + 1):
        w.handle(events.EnvironmentGone(id=f"e{number}", state="closed", node="n0", reason="unused", at=0.0))
    # Then it is still known, and of the others the oldest is forgotten
    for environment in ("lost", "e0", "e1"):
        w.exec(f"on-{environment}", environment)
    assert w.ended("on-lost") == ("lost", "environment lost is lost: node n9 was lost: it burned")
    assert w.ends["on-lost"].environment_lost_on == "n9"
    assert "unknown" in w.ended("on-e0")[1]
    assert "unused" in w.ended("on-e1")[1]


def test_an_environment_cannot_be_opened_twice(world: Any) -> None:
    w = world().node().open("e0")
    w.submit("again", "cpu.open", environment="e0")
    assert w.ended("again") == ("rejected", "environment e0 is open already")


def test_an_action_too_large_for_the_node_of_its_environment_is_rejected_and_blocks_nobody(world: Any) -> None:
    # Given an action that came before anyone knew where its environment would stand
    w = world().open("e0")
    w.exec("large", "e0", 16, session="main")
    w.exec("next", "e0", 1, session="main")
    w.node(cores=8)
    w.finish("open-e0")
    assert w.ended("large") == ("rejected", "needs 16 cores, its environment can have 8")
    assert "next" in w.grants


def test_actions_of_one_session_run_in_order_and_those_of_another_beside_them(world: Any) -> None:
    w = world().node().open("e0")
    w.exec("a1", "e0", session="main")
    w.exec("a2", "e0", session="main")
    w.exec("a3", "e0", session="main")
    w.exec("b", "e0", session="other")
    w.exec("c", "e0")
    assert list(w.grants) == ["a1", "b", "c"]
    w.finish("a1")
    assert "a2" in w.grants
    assert "a3" not in w.grants
    w.finish("a2")
    assert "a3" in w.grants


def test_room_comes_back_only_when_the_last_process_is_gone(world: Any) -> None:
    # Given a pod whose environment is closed while an action still runs in it
    w = world("static:4").node(cores=4).open("e0")
    w.exec("runs", "e0", 4)
    w.close("e0")
    w.open("e1", finish=False)
    w.finish("close-e0")
    assert w.waiting == ["open-e1"]
    w.finish("runs", "cancelled")
    # Then its cores are free once, and once only
    assert w.grants["open-e1"].core_ids == (0, 1, 2, 3)
    assert w.core.pools.cpu.groups["n0"].free == 0


def test_an_environment_closed_while_it_opens_is_closed_once_it_stands(world: Any) -> None:
    w = world().node().open("e0", finish=False)
    w.exec("a", "e0")
    w.close("e0")
    w.submit("again", "cpu.close", environment="e0")
    assert w.started == ["open-e0"]
    w.finish("open-e0")
    assert w.started == ["open-e0", "close-e0"]
    assert w.ended("a") == ("failed", "its environment was closed")
    assert w.ended("again") == ("failed", "environment e0 is being closed")
    w.finish("close-e0")
    assert w.states("e0") == ["waiting", "opening", "open", "closing", "closed"]


def test_an_environment_closed_before_it_was_placed_never_opens(world: Any) -> None:
    w = world().open("e0")
    w.exec("a", "e0")
    w.close("e0")
    assert w.ends["close-e0"].status == "succeeded"
    assert w.ends["open-e0"].status == "cancelled"
    assert w.ends["a"].status == "failed"
    assert w.waiting == []


def test_an_unused_environment_is_closed_when_its_lease_is_over(world: Any) -> None:
    w = world(lease_s=60.0).node().open("e0")
    w.exec("a", "e0")
    w.tick(100.0)
    assert w.of(commands.CloseEnvironment) == []
    w.finish("a")
    w.tick(59.0)
    assert w.of(commands.CloseEnvironment) == []
    w.tick(2.0)
    assert [c.id for c in w.of(commands.CloseEnvironment)] == ["e0"]


@pytest.mark.parametrize("told", ["by a beat", "by an event"])
def test_the_room_of_an_environment_closed_by_the_system_comes_back_once_its_node_has_it_no_more(world: Any, told: str) -> None:
    w = world(lease_s=60.0).node(memory_mb=100).open("e0", memory_mb=100)
    w.tick(61.0)
    w.open("e1", memory_mb=100, finish=False)
    w.beat(environments=("e0",))
    assert w.waiting == ["open-e1"]
    if told == "by a beat":
        w.beat()
    else:
        w.handle(events.EnvironmentClosed(id="e0", reason="closed"))
    assert "open-e1" in w.grants
    assert w.states("e0")[-1] == "closed"


def test_an_environment_that_its_node_closes_unasked_ends_with_what_waits_in_it(world: Any) -> None:
    w = world().node().open("e0")
    w.several(w.exec, "a", 2, "e0", session="main")
    w.handle(events.EnvironmentClosed(id="e0", reason="it is no more"))
    assert w.ended("a1")[1] == "it is no more"
    w.finish("a0", "cancelled")
    assert w.states("e0")[-2:] == ["closing", "closed"]


def test_a_cancelled_trajectory_ends_with_all_its_actions_and_environments(world: Any) -> None:
    w = world(without=["preemption"]).node(cores=1)
    for name in ("e0", "e1"):
        w.open(name, trajectory="t", finish=name == "e0")
    w.exec("runs", "e0", trajectory="t", session="main")
    w.exec("parked", "e0", trajectory="t", session="main")
    w.exec("waits", "e0", trajectory="t", session="side")
    w.submit("read", "cpu.read_file", environment="e0", trajectory="t", session="side")
    w.run("other", trajectory="u")
    w.handle(events.Cancelled(job="default", trajectory="t", reason="enough"))
    assert w.ended("parked") == w.ended("waits") == w.ended("read") == ("cancelled", "enough")
    assert [stop.id for stop in w.of(commands.Stop)] == ["runs", "open-e1"]
    assert [c.id for c in w.of(commands.CloseEnvironment)] == ["e0"]
    assert w.waiting == ["other"]
    assert w.started == ["open-e0", "open-e1", "runs"], "nothing starts that waited for what is cancelled"


def test_an_environment_that_opens_in_spite_of_a_cancel_is_closed(world: Any) -> None:
    # Given an open that is cancelled when the node is about done with it
    w = world().node().open("e0", finish=False)
    w.handle(events.Cancelled(ids=("open-e0",), reason="enough"))
    assert [(stop.id, stop.reason) for stop in w.of(commands.Stop)] == [("open-e0", "enough")]
    w.finish("open-e0")
    assert [(c.id, c.reason) for c in w.of(commands.CloseEnvironment)] == [("e0", "enough")]


def test_an_environment_that_has_ended_on_its_node_is_lost_and_its_room_comes_back(world: Any) -> None:
    # Given two environments on a node that has no memory for a third, of which the first takes beats to open
    w = world().node(memory_mb=2).open("e1", memory_mb=1, finish=False).open("e2", memory_mb=1).open("e3", memory_mb=1)
    w.beat(environments=("e2",))
    w.beat(environments=("e2",))
    w.finish("open-e1")
    # When the node beats without the first, which may be a beat from before its opening
    w.beat(environments=("e2",))
    w.beat(environments=("e1", "e2"))
    w.beat(environments=("e2",))
    assert w.states("e1")[-1] == "open"
    # And once more without it, with a sign of life in between that is no list of environments
    w.handle(events.NodeBeat(name="n0", environments=None))
    w.beat(environments=("e2",))
    # Then that is lost, later actions on it fail at once, and the third gets its room
    assert [(note.id, note.state) for note in w.of(commands.NoteEnvironment) if note.id == "e1"][-1] == ("e1", "lost")
    w.exec("late", "e1")
    assert w.ended("late") == ("lost", "environment e1 is lost: it ended on node n0")
    assert w.ends["late"].environment_lost_on == "n0"
    assert "open-e3" in w.grants


def test_nobody_waits_for_a_quota_on_the_cores_of_an_environment_that_is_gone(world: Any) -> None:
    # Given an environment with cores of its own, on which a command waits for a quota
    w = world("static:2", quotas=[QuotaSpec(name="web", rate_per_s=0.1)]).node().open("e1")
    for name in ("runs", "waits"):
        w.submit(name, "cpu.exec", cost={"cores": 1, "quota:web": 1}, environment="e1")
    w.finish("runs")
    assert (w.waiting, w.core.next_wake(w.now)) == (["waits"], 10.0)
    w.close("e1", finish=True)
    # Then the core has no reason to be woken when the quota opens
    assert w.core.next_wake(w.now) is None
