"""Nodes that are lost, come back, or beat without working; and what becomes of their actions."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.model import QuotaSpec, ServiceSpec, commands, events


@pytest.mark.parametrize("woken", [True, False])
def test_a_queue_deadline_holds_again_when_an_action_waits_again(world: Any, woken: bool) -> None:
    # Given an action that starts before its deadline, whether or not anyone asked the core for its next wake meanwhile
    w = world().node("n0")
    w.run("a", idempotent=True, queue_timeout_s=5.0)
    if woken:
        assert w.core.next_wake(w.now) is None

    w.now = 2.0
    w.lose("n0")
    w.tick(3.0)

    assert w.ends["a"].status == "timed_out"


def test_an_action_that_lost_two_nodes_is_not_tried_a_third_time(world: Any) -> None:
    # Given an idempotent action, which waits again when its node is lost
    w = world().node("n0")
    w.run("a", 2, idempotent=True)
    w.lose("n0")
    assert [(r.id, r.reason) for r in w.of(commands.Requeue)] == [("a", "node n0 was lost: it burned")]
    w.node("n1")
    assert (w.grants["a"].node, w.grants["a"].attempt) == ("n1", 2)
    # When the next node is lost, too
    w.lose("n1")

    status, reason = w.ended("a")
    assert status == "lost"
    assert reason.startswith("node n1 was lost: it burned; ")
    assert "not tried again" in reason


def test_an_action_that_is_not_idempotent_is_lost_with_its_node(world: Any) -> None:
    w = world().node()
    w.run("a")

    w.lose()

    assert w.ended("a") == ("lost", "node n0 was lost: it burned")
    assert w.ends["a"].by_worker is False


def test_an_action_whose_result_its_lost_node_had_stored_has_ended_as_that_says(world: Any) -> None:
    # Given two commands of an environment, one after the other, and an action that may be repeated
    w = world().node(cores=2).open("e")
    w.exec("first", "e", session="s")
    w.exec("second", "e", session="s")
    w.run("again", idempotent=True)
    w.now = 3.0
    # When their node is lost, and two of them have results
    ended = (
        events.StoredEnd(id="first", status="succeeded", execution_s=2.0, cpu_s=1.5),
        events.StoredEnd(id="again", status="failed", reason="ValueError: no"),
    )
    w.handle(events.NodeLost(name="n0", reason="it burned", ended=ended))
    # Then these count, nobody else has to store them, and nothing is run again
    assert w.ended("first")[0] == "succeeded"
    assert (w.ends["first"].by_worker, w.ends["first"].execution_s, w.ends["first"].cpu_s) == (True, 2.0, 1.5)
    assert w.ended("again") == ("failed", "ValueError: no")
    assert w.of(commands.Requeue) == []
    # And what had none is lost as before
    assert w.ended("second") == ("lost", "environment e is lost: node n0 was lost: it burned")


def test_an_action_that_was_being_stopped_is_not_tried_again(world: Any) -> None:
    w = world().node()
    w.run("a", idempotent=True)
    w.handle(events.Cancelled(ids=("a",)))

    w.lose()

    assert w.ends["a"].status == "lost"


def test_an_environment_that_was_opening_opens_elsewhere(world: Any) -> None:
    w = world(starting_limit=1).node("n0").open("e0", finish=False)
    w.exec("a", "e0")
    w.lose("n0")
    w.node("n1")

    w.finish("open-e0")

    assert w.grants["a"].node == "n1"


def test_a_node_that_joins_again_has_restarted(world: Any) -> None:
    w = world().node(cores=2)
    w.run("a", 2)
    w.run("b", 2)

    w.node(cores=2)

    assert w.ended("a") == ("lost", "node n0 was lost: its worker was restarted")
    assert w.grants["b"].core_ids == (0, 1)


def test_a_node_that_left_says_so(world: Any) -> None:
    w = world().node()

    w.handle(events.NodeLost(name="n0", reason="its worker was stopped", left=True))

    assert [(n.state, n.reason) for n in w.of(commands.NoteNode)] == [("up", ""), ("left", "its worker was stopped")]


def test_a_report_about_an_earlier_try_is_ignored(world: Any) -> None:
    w = world().node("n0")
    w.run("a", idempotent=True)
    w.lose("n0")
    w.node("n1")

    w.handle(events.Finished(id="a", attempt=1, status="succeeded"))

    assert w.ends == {}


def test_the_parts_of_an_act_add_up(world: Any) -> None:
    w = world().node(cores=1)
    w.run("first")
    w.now = 1.0
    w.run("a")
    w.now = 4.0
    w.finish("first")
    w.now = 10.0

    w.finish("a", execution_s=5.0)

    end = w.ends["a"]
    assert (end.queue_s, end.overhead_s, end.execution_s) == (3.0, 1.0, 5.0)


# --- a scheduler that was restarted ---------------------------------------------------------------------------------

SERVICES = (ServiceSpec(name="rm", max_concurrency=2), ServiceSpec(name="big", cells=(2,)))
QUOTAS = (QuotaSpec(name="web", concurrency=1),)


def busy_world(world: Any, policy: str) -> Any:
    """Build a world with something of each sort running, and something of each sort waiting."""
    w = world(policy, services=SERVICES, quotas=QUOTAS).node("n0", cores=8, cells=2, memory_mb=4000)
    w.node("n1", cores=4, cells=0, memory_mb=4000)
    w.open("e0", memory_mb=1000)
    w.open("e1", memory_mb=3500)
    w.open("e2", memory_mb=1000, finish=False)
    w.now = 5.0
    w.exec("exec", "e0", 4 if policy != "static:4" else 2, session="main")
    w.exec("next", "e0", 1, session="main")
    w.submit("build", "build", cost={"cores": 2, "memory_mb": 500}, idempotent=True)
    w.score("s0", "rm")
    w.score("s1", "rm")
    w.score("s2", "big")
    w.call("c0", "web")
    w.call("c1", "web")
    w.open("e3", memory_mb=3900, finish=False)
    w.close("e1")
    return w


def restarted(world: Any, old: Any, policy: str) -> Any:
    """Tell a fresh core what a journal would know of the old one."""
    w = world(policy, services=SERVICES, quotas=QUOTAS)
    w.now = old.now
    for node in old.core.state.nodes.values():
        w.handle(events.NodeJoined(node=node.spec))
    for environment in old.core.state.environments.values():
        if environment.state in ("open", "closing"):
            opened = events.EnvironmentOpened(
                id=environment.id,
                node=environment.node,
                job=environment.job,
                trajectory=environment.trajectory,
                memory_mb=environment.memory_mb,
                pod_core_ids=environment.pod_core_ids,
                used_at=environment.last_used,
                closing=environment.close_requested if environment.state == "closing" else "",
            )
            w.handle(opened)
    everything = [*old.core.state.running.values(), *old.core.state.waiting.values()]
    for item in sorted(everything, key=lambda item: getattr(item, "waiting", item).seq):
        waiting = getattr(item, "waiting", item)
        if waiting is item:
            w.handle(events.Submitted(id=waiting.id, action=waiting.action, submitted_at=waiting.submitted_at))
            continue
        resumed = events.Resumed(
            id=waiting.id,
            action=waiting.action,
            submitted_at=waiting.submitted_at,
            received_at=waiting.received_at,
            granted_at=item.granted_at,
            grant=item.grant,
        )
        w.grants[waiting.id] = item.grant
        w.handle(resumed)
    return w


@pytest.mark.parametrize("policy", ["elastic", "fcfs", "static:4"])
def test_a_restarted_scheduler_goes_on_exactly_as_the_old_one_would(world: Any, policy: str) -> None:
    # Given an old scheduler with much on its hands, and a fresh one that was told of it
    old = busy_world(world, policy)
    new = restarted(world, old, policy)
    assert not new.of(commands.Start)
    assert set(new.waiting) == set(old.waiting)
    for name, node in old.core.state.nodes.items():
        again = new.core.state.nodes[name]
        assert again.memory_free == node.memory_free
        assert new.core.pools.cpu.groups[name].free_ids == old.core.pools.cpu.groups[name].free_ids
        assert list(again.running) == list(node.running)

    # When the same things happen to both
    for w in (old, new):
        w.out.clear()
        w.now = 6.0
        w.exec("later", "e0", 1)
        for name in ("exec", "s0", "c0", "open-e2", "close-e1", "s1", "build"):
            if name in w.grants:
                w.finish(name)

    # Then both do the same, from then on
    assert new.out == old.out
    assert "open-e3" in new.grants or policy == "static:4"


def test_an_action_whose_node_did_not_come_back_waits_again_or_is_lost(world: Any) -> None:
    old = busy_world(world, "elastic")
    old.core.state.nodes.clear()
    new = restarted(world, old, "elastic")

    assert {r.id for r in new.of(commands.Requeue)} == {"build", "open-e2"}
    assert new.ends["exec"].status == "lost"
    new.node("n2", cores=16)
    assert new.grants["build"].node == "n2"


def test_an_idempotent_command_of_an_environment_that_is_gone_never_runs_outside_of_it(world: Any) -> None:
    old = world()
    old.node("n0")
    old.open("e0")
    old.exec("a", "e0", idempotent=True)
    old.core.state.nodes.clear()

    new = restarted(world, old, "elastic")
    new.node("n1")

    assert new.ends["a"].status == "lost"
