"""A scheduler that goes on where another one stopped. `test_machine.py` holds that it takes up whatever there is, as it was."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.journal.database import open_engine
from app.journal.writing import SqlJournal
from scheduler.core.core import Core
from scheduler.cpu.cores import CoreGroup
from scheduler.live.entries import ActionEnded, NodeChanged, SetAside, Unfinished, UnfinishedAction, UnpublishedEnd
from scheduler.model import Grant, Limits, NodeSpec, events
from scheduler.model.commands import Finish, Resize, Start
from tangram.action import Action, Cost
from tangram.elasticity import Amdahl
from tangram.errors import StackUnreachable
from tests.journals import new_journal

from . import deployed
from .deployed import Deployment
from .scene import make_core

NODE = NodeSpec(name="n0", cores=8)


def resumed(action_id: str, action: Action, grant: Grant) -> events.Resumed:
    return events.Resumed(id=action_id, action=action, submitted_at=0.0, received_at=0.0, granted_at=0.0, grant=grant)


def test_cores_that_two_grants_name_belong_to_the_first_and_are_counted_once() -> None:
    # Given a journal that missed a resize, so that two grants name the same core
    core = Core(make_core("elastic", Limits()).policy)
    core.handle(events.NodeJoined(node=NODE), 0.0)
    action = Action(kind="build", cost=Cost.of(cores=(1, 2)), curve=Amdahl(0.9), job="a")
    core.handle(resumed("first", action, Grant(node="n0", units=2, core_ids=(0, 1))), 0.0)
    core.handle(resumed("second", action, Grant(node="n0", units=2, core_ids=(1, 2))), 0.0)
    core.handle(resumed("third", action, Grant(node="n0", core_ids=(2,))), 0.0)
    # Then what a job holds is what it got
    group: CoreGroup = core.pools.cpu.groups["n0"]
    assert [one.grant.core_ids for one in group.running.values()] == [(0, 1), (2,), ()]
    assert core.state.shares._held["a"]["cores"] == 3.0
    core.handle(events.Submitted(id="other", action=action, submitted_at=0.0), 0.0)
    for name in ("first", "second", "third"):
        core.handle(events.Finished(id=name, attempt=1, status="succeeded"), 1.0)
    assert core.state.shares._held["a"]["cores"] == 2.0
    assert group.free == 6
    assert list(group.running) == ["other"]


def test_what_an_action_held_under_an_earlier_scheduler_counts_at_its_end() -> None:
    # Given an action that held two cores for 4 s and then one, and another one that waits again after it held two for 3 s
    core = Core(make_core("elastic", Limits()).policy)
    core.handle(events.NodeJoined(node=NODE), 0.0)
    action = Action(kind="build", cost=Cost.of(cores=1))
    before = replace(resumed("resized", action, Grant(node="n0", core_ids=(0,))), resized_at=4.0, unit_s=8.0)
    again = events.Submitted(id="again", action=action, submitted_at=0.0, received_at=0.0, attempt=1, unit_s=6.0)
    # When the next scheduler goes on with both
    for event in (before, again, events.Tick()):
        core.handle(event, 5.0)
    ends = [core.handle(events.Finished(id=name, attempt=at, status="succeeded"), 10.0) for name, at in (("resized", 1), ("again", 2))]
    # Then what they held before is in what they held
    assert [command.unit_s for out in ends for command in out if isinstance(command, Finish)] == [8.0 + 6.0, 6.0 + 5.0]


@pytest.mark.parametrize("resized", [False, True])
def test_an_action_that_was_resized_under_an_earlier_scheduler_teaches_no_duration(resized: bool) -> None:
    # Given an action that has held four cores since the start, or since it had one; when it ends under the next scheduler
    core = Core(make_core("elastic", Limits()).policy)
    core.handle(events.NodeJoined(node=NODE), 0.0)
    action = Action(kind="build", cost=Cost.of(cores=(1, 2, 4)), curve=Amdahl(1.0), job="a")
    kept = resumed("a", action, Grant(node="n0", units=4, core_ids=(0, 1, 2, 3)))
    core.handle(replace(kept, resized_at=30.0, unit_s=30.0) if resized else kept, 35.0)
    core.handle(events.Finished(id="a", attempt=1, status="succeeded", execution_s=40.0), 40.0)
    # Then its work is learned only if all of its time passed on these cores: 160 s on one, where the resized one had 70
    assert core.state.durations.error().predictions == (0 if resized else 1)


def test_no_part_of_an_act_is_negative_when_the_clock_is_behind_that_of_an_earlier_scheduler() -> None:
    # Given an action that was received and granted at a time which for the next scheduler is still to come
    core = Core(make_core("elastic", Limits()).policy)
    core.handle(events.NodeJoined(node=NODE), 80.0)
    kept = resumed("a", Action(kind="build", cost=Cost.of(cores=1)), Grant(node="n0", core_ids=(0,)))
    core.handle(replace(kept, submitted_at=99.0, received_at=100.0, granted_at=99.5), 80.0)
    # When it ends
    out = core.handle(events.Finished(id="a", attempt=1, status="succeeded", started_at=100.0, execution_s=2.0, waited_s=1.0), 82.0)
    # Then each of its parts is a time
    (end,) = (command for command in out if isinstance(command, Finish))
    assert min(end.queue_s, end.background_s, end.overhead_s, end.execution_s, end.unit_s) >= 0.0


@pytest.mark.parametrize("policy", ["elastic", "elastic without preemption"])
def test_what_ran_in_the_background_gets_a_core_from_the_next_scheduler(policy: str) -> None:
    # Given a node of one core, on which a command of an earlier scheduler holds it, and one is in the background
    core = make_core(policy, Limits())
    core.handle(events.NodeJoined(node=NodeSpec(name="n0", cores=1)), 0.0)
    core.handle(events.EnvironmentOpened(id="e", node="n0", job="a", trajectory="t"), 0.0)
    action = Action(kind="cpu.exec", environment="e", cost=Cost.of(cores=1), job="a")
    core.handle(resumed("holds", action, Grant(node="n0", core_ids=(0,))), 0.0)
    core.handle(resumed("behind", action, Grant(node="n0", background=True)), 0.0)
    # When the core falls free, then that one has it
    out = core.handle(events.Finished(id="holds", attempt=1, status="succeeded"), 1.0)
    assert [(command.id, command.core_ids) for command in out if isinstance(command, Resize)] == [("behind", (0,))]


def test_a_worker_hears_at_once_of_cores_that_the_next_scheduler_does_not_know_as_background() -> None:
    # Given a command in the background of an earlier scheduler
    core = make_core("fcfs", Limits())
    core.handle(events.NodeJoined(node=NODE), 0.0)
    action = Action(kind="build", cost=Cost.of(cores=1))
    # When a policy that has none takes it up
    out = core.handle(resumed("old", action, Grant(node="n0", background=True)), 0.0)
    # Then its worker is told before it can have ended
    assert out == [Resize(id="old", node="n0", attempt=1, core_ids=(), units=1, background=False)]
    ended = core.handle(events.Finished(id="old", attempt=1, status="succeeded"), 0.0)
    assert [type(command) for command in ended] == [Finish]


@pytest.mark.parametrize(
    ("action", "becomes"),
    [
        (Action(kind="cpu.open", environment="e1"), "n0"),
        (Action(kind="build", idempotent=True), "n0"),
        (Action(kind="build"), "lost"),
        (Action(kind="cpu.exec", environment="e1", idempotent=True), "lost"),
    ],
)
def test_what_ran_on_a_node_that_is_gone_begins_elsewhere_with_the_next_event_or_is_lost(action: Action, becomes: str) -> None:
    # Given another node, and an action that an earlier scheduler had begun on one that is gone, perhaps in an environment there
    core = make_core("elastic", Limits())
    core.handle(events.NodeJoined(node=NODE), 0.0)
    if action.kind == "cpu.exec":
        core.handle(events.EnvironmentOpened(id="e1", node="gone", job="default", trajectory="t"), 0.0)
    out = core.handle(resumed("a", action, Grant(node="gone")), 0.0)
    out += core.handle(events.NodeBeat(name="n0"), 0.0)
    # Then it begins there, if it may be repeated and needs no environment that is gone
    assert [one.grant.node if isinstance(one, Start) else one.status for one in out if isinstance(one, Start | Finish)] == [becomes]


def test_a_lease_and_a_client_that_an_open_has_named_are_those_of_its_environment_under_the_next_scheduler(world: Any) -> None:
    # Given two environments that an earlier scheduler was opening for one client, one on a lease, and one that is detached
    w = world().node()
    leased = Action(kind="cpu.open", environment="leased", client="c", lease_s=100.0)
    detached = Action(kind="cpu.open", environment="detached", client="c", detached=True)
    for action in (leased, detached):
        name = f"open-{action.environment}"
        w.grants[name] = Grant(node="n0")
        w.handle(resumed(name, action, w.grants[name]))
        w.finish(name)
    assert [w.core.state.environments[name].ends_at for name in ("leased", "detached")] == [100.0, None]
    # When the client is gone, then only the first is closed
    w.handle(events.ClientGone(client="c", reason="its client is gone"))
    assert [w.core.state.environments[name].state for name in ("leased", "detached")] == ["closing", "open"]


def test_a_scheduler_that_takes_up_much_renews_its_lease_meanwhile(tmp_path: Path) -> None:
    # Given a journal with a hundred actions that have not ended
    engine = open_engine(new_journal(tmp_path / "journal.sqlite"))
    deployment = Deployment(SqlJournal(engine))
    deployment.start()
    deployment.submit(*(f"a{number}" for number in range(100)))
    deployment.looks = 0
    deployment.start()
    # Then it has looked at its lease again for each of them, so that no standby takes it for silent
    assert len(deployment.waiting) == 100 and deployment.looks >= 100
    engine.dispose()


def test_what_waits_for_a_service_of_a_node_that_is_away_waits_on_under_the_next_scheduler(tmp_path: Path) -> None:
    # Given two nodes with a service each, one of which is gone, and an action that waits for that
    engine = open_engine(new_journal(tmp_path / "journal.sqlite"))
    deployment = Deployment(SqlJournal(engine), now=time.time())
    deployment.start()
    gpu: dict[str, Any] = {"kinds": ["gpu"], "cores": 0, "cells": 1, "instances": []}
    deployment.join("away", services={"reward": {}}, **gpu)
    deployment.join("up", services={"teacher": {}}, **gpu)
    deployment.told({"type": "left", "name": "away", "incarnation": "1"})
    score: dict[str, Any] = {"kind": "gpu.score", "service": "reward", "cost": {"cells": 1}}
    deployment.submit("before", **score)
    # When the next scheduler begins, and one action more comes
    deployment.start()
    deployment.submit("after", **score)
    assert deployment.waiting == ["before", "after"]
    # Then both go on once the node is back, unless it has come back without the service
    deployment.join("away", services={"reward": {}}, **gpu | {"incarnation": "2"})
    deployment.wait(0.5)
    assert deployment.running[:1] == ["before"]
    deployment.told({"type": "left", "name": "away", "incarnation": "2"})
    deployment.join("away", services={}, **gpu | {"incarnation": "3"})
    assert deployment.ends()["after"] == ("rejected", False)
    engine.dispose()


def test_a_submission_that_was_rejected_and_comes_again_is_not_taken_a_second_time() -> None:
    # Given a scheduler that stood still when the journal had a rejection, and neither the client nor the broker had heard of it
    deployment = Deployment()
    deployment.journal.left = Unfinished(
        actions=[], environments=[], nodes=[], unpublished=[UnpublishedEnd(id="a", message=deployed.MESSAGE, status="rejected", reason="")]
    )
    deployment.start()
    deployment.join()
    deployment.submit("a", "b")
    assert deployment.running == ["b"] and deployment.broker.end("a") == ("rejected", "impossible")


def test_an_action_that_is_set_aside_ends_once_the_store_says_how_its_worker_has_ended_it() -> None:
    # Given an action on a node that is up, whose worker has stored its result, and on which schedulers have failed
    deployment = Deployment()
    running = UnfinishedAction(
        id="a", header={"kind": "my.task"}, message=deployed.MESSAGE, submitted_at=990.0, received_at=990.0, grant=Grant(node="n")
    )
    up = NodeChanged(name="n", state="up", description=deployed.NODE, at=990.0)
    found = SetAside(message="action a", kind="reload", action="a", failures=2, error="KeyError", failed_at=995.0)
    deployment.journal.left = Unfinished(actions=[running], environments=[], nodes=[up], set_aside=[found])
    deployment.stored(a=7)
    # When the next scheduler begins while the store is away, then nothing is said of the action
    deployment.away()
    with pytest.raises(StackUnreachable, match="how actions have ended that are set aside"):
        deployment.start()
    assert deployment.journal.entries == []
    # And once it is back, it has ended as it did
    deployment.back()
    deployment.start()
    assert [one.end.status for one in deployment.journal.entries if isinstance(one, ActionEnded)] == ["succeeded"]
    assert deployment.broker.end("a") == ("succeeded", "")
