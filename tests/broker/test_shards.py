"""Several shards on one broker and one store: what is sent comes to the shard that it belongs to, and each knows what the others carry."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery

from app.broker.memory import use
from app.broker.memory_store import MemoryBroker
from app.routing import action, install_routing
from app.scheduler_document import SHOWN_TTL_S, read_shown
from scheduler.live.transport import Received
from tangram import Action, Cost
from tangram.errors import StackUnreachable
from tangram.shards import FIRST, Loads, shard_of
from tangram.wire import ACTION_HEADER, CONTAINERS, CONTROL_QUEUE, INGRESS_QUEUE, WireKind, WireLoad, direct_queue, node_label, of_shard
from tests.broker.conftest import MOST_SHARDS, Stack, take

NOTHING: dict[str, Any] = {"offered": {}, "held": {}}
KIND: WireKind = {"labels": ["gpu"], "memory_mb": 1000}
BIG: WireKind = {"labels": ["big", "gpu"], "memory_mb": 4000}
LOAD: WireLoad = {
    **{"cores": 8, "labels": ["gpu"], "kinds": [KIND], "environments": 4, "opening": 0},
    **{"units": NOTHING, "memory": NOTHING},
}  # type: ignore[typeddict-item]
SHOWN: dict[str, Any] = {
    **{"policy": "elastic", "epoch": 1, "waiting": 2, "running": 3, "decisions": 5, "resizes": 0, "restores": 0, "predictions": 0},
    **{"decision_us_p50": 10.0, "decision_us_p99": 20.0, "prediction_factor_p50": 1.0, "prediction_factor_p90": 1.0},
    **{"queues": [{"kind": "cores", "name": "n0", "waiting": 1, "first": ["a"]}], "quotas": {}, "held_back": {}, "beat_s": 1.0},
    **{"jobs": {"a": {"share": 0.5, "over": False}}, "starting": {"now": 1, "waiting": 0, "limit": 32, "next_in_s": 0.5}},
    "nodes": {"n0": {"beat_ago_s": 1.0}},
}


def queue(name: str, shard: int) -> Any:
    return direct_queue(of_shard(name, shard))


def ids(received: list[Received]) -> list[str]:
    return [one.id for one in received]


def environment_of(shard: int) -> str:
    """Return the id of an environment of this shard."""
    return next(name for number in range(1000) if shard_of(name := f"env-{number}", MOST_SHARDS) == shard)


def test_a_scheduler_takes_what_is_sent_to_its_shard_and_puts_back_what_was_taken_there(stack: Stack) -> None:
    # Given two schedulers of the same epoch, each with an action that it has not acknowledged
    for shard in (0, 1):
        stack.put_actions(f"of-{shard}", queue=queue(INGRESS_QUEUE, shard))
    first, second = stack.open(shard=0, shards=2), stack.open(shard=1, shards=2)
    [held] = take(first, bool, keep=True)
    [lost] = take(second, bool, keep=True)
    assert (held.id, lost.id) == ("of-0", "of-1")
    # When the second one is gone, and its successor has looked for what was taken
    second.close()
    later = stack.open(2, shard=1, shards=2)
    # Then it gets that of its shard, and the other one is not disturbed
    assert ids(take(later, bool)) == ["of-1"]
    stack.put_actions("next", queue=queue(INGRESS_QUEUE, 1))
    assert ids(take(later, bool)) == ["next"]
    first.flush([held])
    stack.put_actions("last", queue=queue(INGRESS_QUEUE, 0))
    assert ids(take(first, bool)) == ["last"]


def test_each_says_what_it_carries_and_hears_what_the_others_do(stack: Stack) -> None:
    first, second = stack.open(shard=0, shards=3), stack.open(shard=2, shards=3)
    assert first.exchange(LOAD) == []
    assert second.exchange({**LOAD, "environments": 6}) == [LOAD]
    assert first.exchange(LOAD) == [{**LOAD, "environments": 6}]


def test_tools_see_the_schedulers_of_all_shards_as_one(stack: Stack) -> None:
    first, second = stack.open(shard=0, shards=2), stack.open(shard=1, shards=2)
    first.show(SHOWN)
    # Given one that does not show itself, then that is said of it
    shown = read_shown(stack.store, 2)
    assert shown is not None and (shown["shard"], shown["shown_ago_s"]) == (1, SHOWN_TTL_S)
    # Given both, then counts are added up
    jobs = {"a": {"share": 0.7, "over": True}, "b": {"share": 0.1, "over": False}}
    second.show({**SHOWN, "nodes": {"n1": {"beat_ago_s": 3.0}}, "jobs": jobs, "decision_us_p99": 90.0})
    shown = read_shown(stack.store, 2)
    assert shown is not None and shown["shown_ago_s"] < SHOWN_TTL_S
    assert {name: shown[name] for name in ("waiting", "running", "decisions", "decision_us_p99")} == {
        **{"waiting": 4, "running": 6, "decisions": 10},
        "decision_us_p99": 90.0,
    }
    assert shown["starting"] == {"now": 2, "waiting": 0, "limit": 64, "next_in_s": 0.5}
    assert (list(shown["nodes"]), len(shown["queues"]), shown["jobs"]) == (["n0", "n1"], 2, jobs)


def test_a_client_sends_each_action_to_its_shard_and_to_all_what_it_does_not_know(stack: Stack) -> None:
    session = stack.session(MOST_SHARDS)
    for shard in range(MOST_SHARDS):
        session.submit(Action(kind="cpu.exec", environment=environment_of(shard), arguments={"command": "true"}))
    for cost in ({"cells": 1}, {"quota:search": 1}):
        session.submit(Action(kind="my.task", cost=Cost.of(**cost)))
    session.submit(Action(kind="gpu.score", service="judge"))
    lone = session.submit(Action(kind="my.task", cost=Cost.of(cores=1)), f"{session.client_id}-lone")
    of_lone = shard_of(lone.id, MOST_SHARDS)
    session.wait_for(session.cancel_task(lone.id))
    session.wait_for(session.cancel_task("of-another-client"))

    def kinds(shard: int, count: int) -> list[str]:
        return sorted(message.headers["task"] for message in stack.taken(queue(INGRESS_QUEUE, shard), count))

    for shard in range(MOST_SHARDS):
        expected = ["cpu.exec", *(["gpu.score", "my.task", "my.task"] if shard == FIRST else [])]
        expected += ["my.task"] if shard == of_lone else []
        assert kinds(shard, len(expected)) == sorted(expected)
        cancelled = [*([lone.id] if shard == of_lone else []), "of-another-client"]
        requests = stack.taken(queue(CONTROL_QUEUE, shard), len(cancelled))
        assert [request.decode() for request in requests] == [{"cancel": {"ids": [one]}} for one in cancelled]


def test_environments_are_opened_where_least_stands_and_where_their_labels_are(stack: Stack) -> None:
    # Given shards of which the second has a third of the cores, and the third alone a label
    of_shards = [{"cores": 30}, {"cores": 10}, {"cores": 30, "labels": ["gpu", "big"], "kinds": [BIG], "environments": 40}]
    for shard, load in enumerate(of_shards):
        stack.open(shard=shard, shards=MOST_SHARDS).exchange({**LOAD, **load})  # type: ignore[typeddict-item]
    loads = Loads(MOST_SHARDS)
    loads.look(stack.store)
    # When many are opened before the loads are looked at again
    opened = [shard_of(loads.new_environment(), MOST_SHARDS) for _ in range(80)]
    # Then each shard has as many for each core, as nearly as one more allows
    of_each = [(4 + opened.count(0)) / 30, (4 + opened.count(1)) / 10, (40 + opened.count(2)) / 30]
    assert max(of_each) - min(of_each) <= 1 / 10
    assert {shard_of(loads.new_environment(["big"]), MOST_SHARDS) for _ in range(10)} == {2}
    # And an open for a node that is drained goes to its shard, to wait there
    stack.open(shard=2, shards=MOST_SHARDS).exchange({**LOAD, "labels": ["big"], "kinds": [BIG], "cores": 0})
    loads.look(stack.store)
    assert shard_of(loads.new_environment(["big"]), MOST_SHARDS) == 2 != shard_of(loads.new_environment(), MOST_SHARDS)
    # And where opens wait there is no room
    stack.open(shard=0, shards=MOST_SHARDS).exchange({**LOAD, "cores": 1000, "opening": 1})
    loads.look(stack.store)
    assert 0 not in {shard_of(loads.new_environment(), MOST_SHARDS) for _ in range(80)}


def opens_on(
    stack: Stack, loads: dict[int, dict[str, Any]], requires: tuple[str, ...] = (), memory_mb: int = 0, opens: int = 20, clients: int = 1
) -> set[int]:
    """Return the shards on which clients open their first environments where shards carry this."""
    for shard, load in loads.items():
        stack.open(shard=shard, shards=MOST_SHARDS).exchange({**LOAD, **load})  # type: ignore[typeddict-item]
    found = set[int]()
    for _ in range(clients):
        known = Loads(MOST_SHARDS)
        known.look(stack.store)
        found |= {shard_of(known.new_environment(requires, memory_mb), MOST_SHARDS) for _ in range(opens)}
    return found


def test_opens_do_not_wait_on_a_shard_without_nodes_since_they_wait_elsewhere_too(stack: Stack) -> None:
    assert opens_on(stack, {0: {"opening": 9}, 1: {"cores": 0, "labels": [], "kinds": []}, 2: {"cores": 0}}) == {0}


def test_clients_that_begin_at_once_do_not_all_open_on_the_same_one_of_like_shards(stack: Stack) -> None:
    assert opens_on(stack, {0: {}, 1: {}, 2: {}}, opens=1, clients=60) == {0, 1, 2}


def test_an_open_goes_where_one_node_has_all_its_labels_and_its_memory(stack: Stack) -> None:
    # Given a shard whose nodes have the labels, but none has both, and others with a node that has both
    apart = {"labels": ["gpu", "big"], "kinds": [{"labels": ["gpu"], "memory_mb": 9000}, {"labels": ["big"], "memory_mb": 9000}]}
    of_shards = {0: apart, 1: {"labels": ["gpu", "big"], "kinds": [BIG], "environments": 99}, 2: {}}
    assert opens_on(stack, of_shards, ("big", "gpu")) == {1}
    # Given a need of memory, then a shard with a node of so much
    assert opens_on(stack, {2: {}}, ("gpu",), 2000) == {0}
    assert opens_on(stack, {0: {}}, ("gpu",), 2000) == {1}
    # Given the name of a node, then its shard, which says why not
    assert opens_on(stack, {2: {"labels": ["gpu", node_label("n")]}}, (node_label("n"),), 99_999) == {2}


def test_an_open_that_no_known_shard_can_hold_goes_to_one_that_says_nothing_and_else_to_one_that_refuses_it(stack: Stack) -> None:
    assert opens_on(stack, {0: {}, 2: {}}, ("big",)) == {1}
    assert opens_on(stack, {1: {"cores": 0, "labels": [], "kinds": []}}, ("big",)) == {0, 2}


@pytest.mark.parametrize("counted", [1, 3])
def test_a_client_that_counts_other_shards_than_the_schedulers_does_not_begin(stack: Stack, counted: int) -> None:
    stack.open(shard=0, shards=2).show(SHOWN)
    stack.session(2)
    with pytest.raises(StackUnreachable, match=f"^TANGRAM_SHARDS is {counted} here, and 2 for the schedulers$"):
        stack.session(counted, connect_timeout_s=0.1)


def test_who_knows_no_loads_opens_anywhere() -> None:
    loads = Loads(MOST_SHARDS)
    assert {shard_of(loads.new_environment(), MOST_SHARDS) for _ in range(200)} == set(range(MOST_SHARDS))
    opening = Action(kind="cpu.open", environment="env-1", trajectory="env-1", arguments={"environment": "env-1"})
    assert loads.place(opening) == opening


def nothing() -> None:
    """Stand for a task that nobody runs."""


@pytest.fixture
def routed() -> Iterator[tuple[Celery, MemoryBroker]]:
    broker = MemoryBroker()
    with use(Celery(set_as_current=False), broker) as app:
        install_routing(app, MOST_SHARDS)
        yield app, broker


def test_a_celery_task_goes_to_its_shard(routed: tuple[Celery, MemoryBroker]) -> None:
    app, broker = routed
    build = action(app, name="shards.build", cores=1)(nothing)
    ask = action(app, name="shards.ask", quotas={"search": 1})(nothing)

    def waiting() -> list[int]:
        return [len(broker.waiting(of_shard(INGRESS_QUEUE, shard))) for shard in range(MOST_SHARDS)]

    def sent(count: int, shard: int) -> bool:
        before, expected = waiting_before.copy(), waiting()
        before[shard] += count
        waiting_before[:] = expected
        return before == expected

    waiting_before = waiting()
    build.apply_async(task_id="lone")
    build.apply_async(task_id="lone")
    assert sent(2, shard_of("lone", MOST_SHARDS))
    ask.delay()
    app.send_task("shards.build")
    assert sent(2, FIRST)
    for number in range(2 * MOST_SHARDS):  # what a call says counts, not what was declared
        build.apply_async(task_id=f"task-{number}", headers={ACTION_HEADER: {"cost": {"quota:search": [1]}}})
    assert sent(2 * MOST_SHARDS, FIRST)
    for shard in range(MOST_SHARDS):
        described = {ACTION_HEADER: {"kind": "shards.build", "environment": environment_of(shard)}}
        build.apply_async(headers=described)
        app.send_task("shards.build", headers=described)
        assert sent(2, shard)


class _Deployed:
    """What a gateway reads of a deployment whose nodes have these labels, and where it enters environments."""

    def __init__(self, *labels: str) -> None:
        self._labels = set(labels)

    async def labels(self) -> set[str]:
        return self._labels

    async def enter(self, record: Any) -> None:
        """Take note of nothing."""


def test_a_gateway_opens_an_environment_with_an_image_where_nodes_have_containers(stack: Stack) -> None:
    pytest.importorskip("fastapi", reason="the extra `gateway` is not installed")
    from app.gateway.environments import Environments
    from app.gateway.sessions import Caller

    with_containers: WireKind = {"labels": [CONTAINERS], "memory_mb": 1000}
    stack.open(shard=2, shards=MOST_SHARDS).exchange({**LOAD, "labels": [CONTAINERS], "kinds": [with_containers], "environments": 99})
    for shard in (0, 1):
        stack.open(shard=shard, shards=MOST_SHARDS).exchange(LOAD)
    caller = Caller(job="default", session=stack.session(MOST_SHARDS))

    def opened(*labels: str) -> set[int]:
        async def begin() -> list[str]:
            deployed: Any = _Deployed(*labels)
            gateway, same = Environments(deployed, deployed), {"files": {}, "memory_mb": None, "lease_s": 60.0}
            return [(await gateway.begin(caller, image="python:3.12", **same))[0].id for _ in range(6)]  # type: ignore[arg-type]

        return {shard_of(environment, MOST_SHARDS) for environment in asyncio.run(begin())}

    assert opened(CONTAINERS) == {2}
    assert opened("gpu") == {0, 1}  # where no node has any, an image is a label only
