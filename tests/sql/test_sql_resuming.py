"""A scheduler that goes on where another one stopped, over the real journal: pods, what was closing, what waits, what drains."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine

from app.journal.writing import SqlJournal
from scheduler.cpu.cores import CoreGroup
from scheduler.model import QuotaSpec
from scheduler.model.state import Node
from tangram.wire import node_queue
from tests.scheduler.deployed import NODE, Deployment
from tests.sql import tables


class Deployed(Deployment):
    """A node of 8 cores and 1000 MB, and schedulers one after another."""

    @property
    def node(self) -> Node:
        return self.core.state.nodes["n"]

    @property
    def cores(self) -> CoreGroup:
        return self.core.pools.cpu.groups["n"]

    @property
    def pods(self) -> dict[str, tuple[int, ...]]:
        return {environment.id: environment.pod_core_ids for environment in self.core.state.environments.values()}

    def cancel(self, trajectory: str) -> None:
        self.asked({"cancel": {"job": "default", "trajectory": trajectory}})

    def drain(self, node: str, *, draining: bool = True) -> None:
        self.asked({"drain": {"node": node, "draining": draining}})


@pytest.fixture
def begin(journal: SqlJournal) -> Callable[..., Deployed]:
    """Return what begins a deployment under a policy."""

    def start(policy: str, **more: Any) -> Deployed:
        deployment = Deployed(journal, time.time())
        deployment.start(policy, **more)
        deployment.join()
        return deployment

    return start


def written(engine: Engine, table: str, key: str, column: str) -> dict[str, Any]:
    """Return what the journal has in a column, by the key of its table."""
    return {row[key]: row[column] for row in tables.rows(engine, table)}


def test_a_lease_that_was_renewed_before_the_environment_stood_is_kept(begin: Callable[..., Deployed]) -> None:
    # Given an environment that is being opened and one that waits for room; when the leases of both are renewed and the scheduler restarts
    one = begin("elastic")
    one.open("opening", finish=False, memory_mb=800)
    one.open("waiting", finish=False, memory_mb=800)
    for name in ("opening", "waiting"):
        one.asked({"renew": {"environment": name, "job": "default", "lease_s": 600.0}})
    for _ in range(2):
        one.now += 30.0
        one.start("elastic")
    # Then each has its lease once it stands
    one.now += 40.0
    one.finish("open-opening")
    ends_at = one.now + 600.0
    assert one.core.state.environments["opening"].ends_at == ends_at
    # And under the next scheduler, too
    one.now += 1.0
    one.start("elastic")
    assert one.core.state.environments["opening"].ends_at == ends_at
    one.close("opening", finish=True)
    one.finish("open-waiting")
    assert one.core.state.environments["waiting"].ends_at == one.now + 600.0


def test_pods_hold_the_cores_that_they_held(begin: Callable[..., Deployed]) -> None:
    # Given pods, one with a command that runs, one that is being opened, and another of a name that was used before
    one = begin("static:2")
    one.open("e0")
    one.close("e0", finish=True)
    one.open("taken")
    one.submit("again", kind="cpu.open", environment="e0", cost={})
    one.finish("again")
    one.exec("runs", "e0")
    one.open("e2", finish=False)
    pods, free = one.pods, one.cores.free_ids
    assert [len(pod) for pod in pods.values()] == [2, 2, 2]

    one.start("static:2")

    assert (one.pods, one.cores.free_ids) == (pods, free)
    one.exec("next", "taken")
    assert set(one.core.state.running["next"].grant.core_ids) <= set(pods["taken"])
    one.finish("runs")
    one.finish("next")
    one.close("taken", finish=True)
    assert one.cores.free_ids == sorted([*free, *pods["taken"]])


def test_what_the_system_closes_goes_on_closing_and_its_memory_is_free_once(begin: Callable[..., Deployed], engine: Engine) -> None:
    # Given an environment whose trajectory was cancelled, and a scheduler that may have died before it told the node
    one = begin("elastic")
    one.open("e0", trajectory="t", memory_mb=600)
    one.cancel("t")

    one.start("elastic")
    # Then it tells the node, and takes no more actions there
    assert one.broker.orders() == [("tangram.close_environment", "e0")]
    one.exec("late", "e0")
    assert not one.running and not one.waiting
    assert (one.broker.end("late"), one.node.memory_free) == (("failed", "cancelled"), 400)
    # And when the node has closed it, it is closed and not lost
    for _ in range(3):
        one.beat()
        assert one.node.memory_free == 1000
    assert written(engine, "environments", "id", "state") == {"e0": "closed"}


def test_an_environment_that_was_cancelled_while_it_opened_is_closed_when_it_stands(begin: Callable[..., Deployed]) -> None:
    one = begin("elastic")
    one.open("e0", finish=False, trajectory="t")
    one.cancel("t")
    one.start("elastic")
    one.finish("open-e0")
    assert ("tangram.close_environment", "e0") in one.broker.orders()
    assert one.core.state.environments["e0"].state == "closing"
    one.exec("late", "e0")
    assert one.broker.end("late") == ("failed", "cancelled")


def test_a_change_of_cores_reaches_the_node_and_the_next_scheduler(begin: Callable[..., Deployed]) -> None:
    def changes() -> list[Any]:
        sent = map(json.loads, one.broker.waiting(node_queue("n")))
        return [json.loads(message["body"])[1] for message in sent if message["headers"]["task"] == "tangram.regrant"]

    # Given a command on all cores, which goes to the background for another one, and then gets them again
    one = begin("elastic")
    one.open("e")
    for action_id, priority in (("long", 5), ("urgent", 9)):
        one.submit(action_id, kind="cpu.exec", environment="e", priority=priority, cost={"cores": 8})
    one.finish("urgent")
    # Then its node was told each, in an order that it can tell
    now = ["long", 1, [*range(8)], False]
    first, second = {"epoch": 1, "serial": 1, "grants": [["long", 1, [], True]]}, {"epoch": 1, "serial": 2, "grants": [now]}
    assert changes() == [first, second]
    # And the next scheduler goes on with what it has now, and tells the node again, since the one before may have ended before it did
    one.start("elastic")
    assert changes() == [{"epoch": 2, "serial": 1, "grants": [now]}]
    assert one.core.state.running["long"].grant.core_ids == tuple(range(8))


def test_a_silent_node_has_its_full_time_under_the_next_scheduler(begin: Callable[..., Deployed], engine: Engine) -> None:
    # Given a node that is silent, with a command in an environment
    one = begin("elastic", beat_s=1.0, node_lost_s=60.0)
    one.open("e")
    one.exec("x", "e")
    one.wait(50.0)
    assert tables.row(engine, "nodes")["state"] == "silent"
    # When another scheduler goes on, then the node is lost once it has been silent for its time under that one
    one.start("elastic", beat_s=1.0, node_lost_s=60.0)
    one.wait(59.0)
    assert (tables.row(engine, "nodes")["state"], one.running) == ("silent", ["x"])
    one.wait(2.0)
    assert (tables.row(engine, "nodes")["state"], one.running) == ("lost", [])


def test_a_draining_node_goes_on_draining_under_the_next_scheduler(begin: Callable[..., Deployed], engine: Engine) -> None:
    one = begin("elastic")
    one.open("e0")
    one.drain("n")
    one.open("e1")
    assert one.waiting == ["open-e1"]

    one.start("elastic")
    # Then nothing begins there but in the environment that stands
    assert one.waiting == ["open-e1"]
    one.exec("runs", "e0")
    assert "runs" in one.running
    # And all goes on when the drain is undone, also under the one after it
    one.drain("n", draining=False)
    assert "open-e1" in one.running
    one.start("elastic")
    assert not one.node.draining
    assert written(engine, "nodes", "name", "draining") == {"n": False}


def test_the_drain_of_a_node_that_is_not_there_is_kept_until_it_joins(begin: Callable[..., Deployed], engine: Engine) -> None:
    # Given a node that has left, one that was never there, and a scheduler that knows only the journal
    one = begin("elastic")
    one.told({"type": "left", "name": "n"})
    one.start("elastic")
    one.drain("n")
    one.drain("new")
    # When both join, one under this scheduler and one under the next
    one.join("new")
    one.start("elastic")
    one.join(incarnation="2")
    assert one.node.draining
    assert written(engine, "nodes", "name", "draining") == {"n": True, "new": True}


def test_an_environment_that_no_node_can_hold_ends_with_its_open(begin: Callable[..., Deployed], engine: Engine) -> None:
    # Given an open that waits for any node, and a node that has joined since and is too small
    one = begin("elastic")
    one.told({"type": "left", "name": "n"})
    one.open("large", finish=False, memory_mb=5000)
    one.join()
    assert one.waiting == ["open-large"]
    # When another scheduler goes on; then it refuses the open, and no environment is left
    one.start("elastic")
    assert one.broker.end("open-large") == ("rejected", "impossible")
    assert written(engine, "environments", "id", "state") == {"large": "closed"}


def test_what_an_action_that_has_ended_took_of_a_quota_still_counts(begin: Callable[..., Deployed]) -> None:
    # Given a quota of one request in ten seconds, and an action that took it and has ended; when another scheduler goes on
    quotas, cost = [QuotaSpec(name="web", rate_per_s=0.1)], {"cores": 1, "quota:web": 1}
    one = begin("fcfs", quotas=quotas)
    one.submit("before", kind="build", cost=cost)
    one.finish("before")
    one.start("fcfs", quotas)
    one.submit("after", kind="build", cost=cost)
    assert one.waiting == ["after"]
    one.now += 10.1
    one.service.step()
    assert one.running == ["after"]


def test_the_next_scheduler_tells_the_ends_that_a_killed_one_had_only_written_down(begin: Callable[..., Deployed]) -> None:
    # Given an action that a scheduler ends while the result store is away, so that nobody is told
    one = begin("fcfs")
    one.away()
    one.submit("a", cost={"cores": NODE["cores"] + 1})
    assert one.broker.end("a") is None
    # When the store is back, and the next scheduler begins, then its client is told, once
    one.back()
    one.start("fcfs")
    one.told()
    assert one.broker.end("a") == ("rejected", "impossible")
    assert one.journal.unfinished().unpublished == ()


def test_tries_that_lost_a_node_are_counted_over_a_restart(begin: Callable[..., Deployed]) -> None:
    one = begin("fcfs")
    one.submit("a", idempotent=True)
    one.told({"type": "left", "name": "n"})
    assert one.waiting == ["a"]
    # When the next scheduler starts it anew, and that node is lost, too
    one.start("fcfs")
    one.join(incarnation="2")
    assert one.core.state.running["a"].grant.attempt == 2
    one.told({"type": "left", "name": "n"})
    assert one.broker.end("a") == ("lost", "node_lost")


def test_large_arguments_outlive_a_restart(begin: Callable[..., Deployed]) -> None:
    # Given an action that waits, with arguments beside its message that would soon be gone
    one = begin("fcfs")
    one.submit("a", "b", cost={"cores": 8}, blobs=["tangram-blob-1"])
    one.broker.keep("tangram-blob-1", b"large", 300.0)
    # When the next scheduler begins; then it keeps them for long
    one.start("fcfs")
    one.wait(1.0)
    assert (one.broker.left_s("tangram-blob-1") or 0.0) > 300.0


def test_the_next_scheduler_knows_whose_an_environment_is(begin: Callable[..., Deployed], engine: Engine) -> None:
    # Given an environment of a client, which has a name for people; when another scheduler writes down what becomes of it
    one = begin("fcfs")
    one.submit("open-e", kind="cpu.open", environment="e", trajectory="t", client="c", owner="host:7", cost={})
    one.finish("open-e")
    opened_at = one.now
    one.now += 30.0
    one.start("fcfs")
    environment = one.core.state.environments["e"]
    assert (environment.client, environment.last_used) == ("c", opened_at)
    one.cancel("t")
    row = tables.row(engine, "environments")
    assert (row["state"], row["trajectory"], row["client"], row["owner"]) == ("closing", "t", "c", "host:7")
