"""The result store beside a broker: ends, claims, names, signs of life, blobs, and the client's subscription."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context
from redis import RedisError

from app.action_task import Call
from app.broker.transport import KombuTransport
from app.local.processes import wait_until
from app.scheduler_document import SHOWN_TTL_S, read_shown
from app.services_file import ConfigError
from scheduler.live.entries import UnpublishedEnd
from scheduler.model.events import StoredEnd
from tangram import Action, ActionCancelled, ActionFailed, ActionLost
from tangram.blobs import Blobs
from tangram.errors import EnvironmentLost
from tangram.life_signs import give_sign
from tangram.wire import CLAIM_KEY_PREFIX, CLAIM_TTL_S, CLIENT_KEY_PREFIX, ENDED_CLAIM_TTL_S, NODE_KEY_PREFIX, RESULT_KEY_PREFIX
from tests.broker.conftest import CALLBACKS, Stack, take
from tests.nodes import DESCRIPTION, claim
from workers.node import Node
from workers.unique_name import UniqueName

MESSAGE = {"body": "W10=", "headers": {"id": "a"}, "properties": {"content_type": "application/json", "content_encoding": "utf-8"}}


def with_errback(app: Celery, action_id: str = "a", options: dict[str, Any] | None = None, **headers: Any) -> str:
    """Return the message of an action that has something called when it fails."""
    callback = app.signature("my.callback", options={"queue": "callbacks", **(options or {})})
    body = json.dumps([[], {}, {"errbacks": [callback]}])
    return json.dumps({**MESSAGE, "body": body, "headers": {"id": action_id, **headers}})


def lost(action_id: str, message: str = json.dumps(MESSAGE), **more: str) -> UnpublishedEnd:
    """Return the end of an action that was lost with its node."""
    return UnpublishedEnd(id=action_id, message=message, status="lost", reason="its node was lost", **more)


def store_all(transport: KombuTransport) -> None:
    assert wait_until(lambda: transport.flush() is None and not transport.ends_to_store, 60)


def node(stack: Stack) -> Node:
    return Node(Celery(set_as_current=False), stack.store, DESCRIPTION, beat_s=1.0, usage_s=1.0, timeout_s=60.0)


def test_what_workers_have_stored_is_read_as_the_ends_it_tells_of(stack: Stack) -> None:
    act = {"queue_s": 0.5, "background_s": 0.75, "overhead_s": 0.1, "execution_s": 1.5}
    backend = stack.app.backend
    # Given results of all sorts, as workers store them
    for action_id, status in (("done", "succeeded"), ("late", "timed_out")):
        payload = {"status": status, "value": {"cpu_s": 1.25}, "reason": "why", "dop": 1, "act": act}
        backend.store_result(action_id, payload, "SUCCESS")
    backend.store_result("plain", {"status": "timed_out"}, "SUCCESS")
    backend.store_result("wrong", ValueError("no"), "FAILURE")
    backend.store_result("stopped", ActionCancelled("by the trainer"), "FAILURE")
    backend.store_result("closed", EnvironmentLost("its node is gone", "n", "environment_lost"), "FAILURE")
    backend.store_result("running", None, "STARTED")
    kinds = {"done": "cpu.exec", "late": "cpu.exec", "plain": "my.task", "wrong": "my.task", "stopped": "cpu.exec", "closed": "cpu.exec"}
    transport = stack.open()
    ends = transport.stored_ends({**kinds, "running": "cpu.exec", "missing": "cpu.exec"})
    # Then each that has ended is told, and no other
    assert ends == [
        StoredEnd(id="done", status="succeeded", reason="why", background_s=0.75, execution_s=1.5, cpu_s=1.25),
        StoredEnd(id="late", status="timed_out", reason="why", background_s=0.75, execution_s=1.5, cpu_s=1.25),
        StoredEnd(id="plain", status="succeeded"),
        StoredEnd(id="wrong", status="failed", reason="ValueError: no", cause="error"),
        StoredEnd(id="stopped", status="cancelled", reason="by the trainer", cause="cancelled"),
        StoredEnd(id="closed", status="lost", reason="its node is gone", cause="environment_lost"),
    ]
    # And nothing is said while the store is away
    with stack.away("store"):
        assert transport.stored_ends(kinds) is None


def test_the_first_end_stays(stack: Stack) -> None:
    backend = stack.app.backend
    # Given actions that have ended, one that has got somewhere, and something that nobody can read
    backend.store_result("done", 1, "SUCCESS")
    backend.mark_as_failure("lost", ActionLost("node n1 is lost"))
    backend.store_result("running", {"pid": 1}, "STARTED")
    stack.store.set(RESULT_KEY_PREFIX + "odd", b"?")
    # When other ends, and what is no end, are stored for them
    for action_id in ("done", "lost", "running", "odd"):
        backend.store_result(action_id, 2, "SUCCESS")
        backend.mark_as_failure(action_id, ActionFailed("late"))
        backend.store_result(action_id, {"pid": 2}, "STARTED")
    # Then each has the first one
    assert [backend.get_result("done"), backend.get_result("running")] == [1, 2]
    assert (stack.store.get(RESULT_KEY_PREFIX + "odd"), 3500 < stack.store.pttl(RESULT_KEY_PREFIX + "done") / 1000 <= 3600) == (b"?", True)
    with pytest.raises(ActionLost, match="n1"):
        raise backend.get_result("lost")


def test_a_store_that_is_away_is_tried_again_and_complained_of_once(stack: Stack, caplog: pytest.LogCaptureFixture) -> None:
    stack.app.conf.result_backend_transport_options = {"retry_policy": {"max_retries": 3, "interval_max": 0.01}}
    with stack.away("store"), pytest.raises((RedisError, OSError)):
        stack.app.backend.store_result("a", 1, "SUCCESS")
    assert [record.exc_info for record in caplog.records if "away" in record.message] == [None]
    stack.app.backend.store_result("a", 1, "SUCCESS")
    assert stack.app.backend.get_result("a") == 1


def test_a_try_that_is_given_up_stores_nothing_any_more(stack: Stack) -> None:
    backend, transport = stack.app.backend, stack.open()

    def store(action_id: str, attempt: int) -> bool:
        call = Call(id=action_id, grant={"attempt": attempt}, header={}, started_at=0.0, began=0.0)  # type: ignore[typeddict-item]
        backend.store_result(action_id, attempt, "SUCCESS", request=Context(grant={"attempt": attempt}, tangram_call=call))
        return not call.refused

    # Given two actions, of which the worker of one has stored its result: its claim is kept as long as its message may come again
    for action_id in ("early", "late"):
        stack.store.set(f"{CLAIM_KEY_PREFIX}{action_id}:1", "a worker", ex=CLAIM_TTL_S)
    assert store("early", 1)
    assert 3600 < stack.store.pttl(f"{CLAIM_KEY_PREFIX}early:1") / 1000 <= ENDED_CLAIM_TTL_S
    # When the scheduler gives both up, and asks how they have ended
    ends = transport.stored_ends({"early": "my.task", "late": "my.task"}, {"early": 1, "late": 1})
    # Then it knows all that its worker ever stores
    assert ends == [StoredEnd(id="early", status="succeeded")]
    assert (store("late", 1), transport.stored_ends({"late": "my.task"})) == (False, [])
    assert stack.store.pttl(f"{CLAIM_KEY_PREFIX}late:1") / 1000 > ENDED_CLAIM_TTL_S
    # And the next try stores its own
    assert (store("late", 2), backend.get_result("late")) == (True, 2)


def test_ends_without_a_worker_are_stored_in_order_and_call_what_hangs_on_them(stack: Stack) -> None:
    # Given actions that end without a worker: some fail, one in an environment that is lost, one has nothing to do
    transport = stack.open()
    transport.store_end(lost("a", with_errback(stack.app), cause="node_lost"))
    transport.store_end(lost("b", environment_lost_on="n"))
    transport.store_end(UnpublishedEnd(id="c", message=json.dumps(MESSAGE), status="succeeded", reason="it was closed before"))
    assert transport.ends_to_store == 3
    store_all(transport)
    # Then each is there, and the callback of the first was sent
    with pytest.raises(EnvironmentLost) as caught:
        raise stack.app.backend.get_result("b")
    assert caught.value.node == "n"
    ends = transport.stored_ends({"a": "my.task", "b": "my.task", "c": "cpu.close"})
    assert [(end.id, end.status, end.reason, end.cause) for end in ends] == [
        ("a", "lost", "its node was lost", "node_lost"),
        ("b", "lost", "its node was lost", "environment_lost"),
        ("c", "succeeded", "it was closed before", ""),
    ]
    assert [message.headers["task"] for message in stack.taken(CALLBACKS, 1)] == ["my.callback"]


@pytest.mark.parametrize(
    ("options", "headers"),
    [
        ({"serializer": "nobody's"}, {}),
        ({"compression": "nobody's"}, {}),
        ({"queue": {"no": "name"}}, {}),
        ({}, {"delivery_info": "a client's own words"}),
    ],
)
def test_an_end_whose_callback_can_never_be_sent_holds_up_no_other(stack: Stack, options: dict[str, Any], headers: dict[str, Any]) -> None:
    # Given two actions that end without a worker, of which the first asks for what nobody can do
    transport = stack.open()
    transport.store_end(lost("bad", with_errback(stack.app, "bad", options, **headers)))
    transport.store_end(lost("good", with_errback(stack.app, "good")))
    store_all(transport)
    # Then the trainers of both know, and what can be sent is
    assert [stack.app.backend.get_state(action_id) for action_id in ("bad", "good")] == ["FAILURE", "FAILURE"]
    assert len(stack.taken(CALLBACKS, 2 if headers else 1)) == (2 if headers else 1)
    # And nothing is left of them in the store
    assert stack.name == "memory" or stack.store.pubsub_channels() == []


@pytest.mark.parametrize("stack", ["memory", "redis"], indirect=True)
def test_an_end_whose_callback_cannot_be_sent_is_told_when_the_broker_is_back(stack: Stack) -> None:
    transport = stack.open()
    with stack.away("broker"):
        # Given an action that ends without a worker, with a callback for that, and a broker that is away
        transport.store_end(lost("a", with_errback(stack.app)))
        transport.flush()
        # Then its trainer knows, and the callback is made up for
        assert stack.app.backend.get_state("a") == "FAILURE" and transport.ends_to_store
    store_all(transport)
    assert len(stack.taken(CALLBACKS, 1)) == 1


def test_a_result_is_said_to_be_lost_only_where_there_is_none_and_none_comes(stack: Stack) -> None:
    # Given an action that has ended, whose result is still to be stored, and two of whose results one is there
    transport, backend = stack.open(), stack.app.backend
    with stack.away("store"):
        transport.store_end(
            UnpublishedEnd(id="told", message=json.dumps(MESSAGE), status="cancelled", reason="its trainer cancelled it", cause="cancelled")
        )
        # When all are asked for again while the store is away
        for action_id in ("stored", "told", "expired"):
            transport.tell_lost(action_id)
        transport.flush()
    backend.store_result("stored", 7, "SUCCESS")
    assert wait_until(lambda: transport.flush() is None and backend.get_state("expired") == "FAILURE", 60)
    # Then only the last one is lost
    store_all(transport)
    assert backend.get_result("stored") == 7
    assert {end.id: (end.status, end.cause) for end in transport.stored_ends(dict.fromkeys(("told", "expired"), "my.task"))} == {
        "told": ("cancelled", "cancelled"),
        "expired": ("failed", "result_lost"),
    }


def test_a_try_is_claimed_once_and_given_up_for_as_long_as_its_claim_lasts(stack: Stack) -> None:
    # Given a try that a node has claimed; when its message comes to another node; then that drops it
    first, second, transport = node(stack), node(stack), stack.open()
    call = claim(first)
    assert call is not None and claim(second) is None
    # And the first drops it too, though the store was restarted and knows of no claim; but the next try is another one
    stack.store.delete(f"{CLAIM_KEY_PREFIX}a:1")
    assert claim(first) is None and claim(second, attempt=2) is not None
    # Given a claim of an action with a long timeout, and none of another one; when both are given up
    long_s = 7 * CLAIM_TTL_S
    stack.store.set(f"{CLAIM_KEY_PREFIX}claimed:1", "a worker", ex=long_s)
    assert [transport.withdraw(name, 1) for name in ("claimed", "late")] == [False, True] and claim(second, "late") is None
    assert transport.stored_ends({"claimed": "x", "unclaimed": "x"}, {"claimed": 1, "unclaimed": 1}) == []
    # Then that is known while the one runs, and the other one's message comes too late
    claimed, unclaimed = (f"{CLAIM_KEY_PREFIX}{name}:1" for name in ("claimed", "unclaimed"))
    assert stack.store.get(claimed) == stack.store.get(unclaimed) == b"disowned"
    assert stack.store.pttl(claimed) > (long_s - 60) * 1000
    assert (CLAIM_TTL_S - 60) * 1000 < stack.store.pttl(unclaimed) <= CLAIM_TTL_S * 1000
    assert claim(second, "unclaimed") is None


def test_a_client_is_as_silent_as_its_last_sign_is_old(stack: Stack) -> None:
    # Given a client that has just given a sign, one whose sign is six of ten seconds old, and signs that are none
    transport = stack.open()
    give_sign(stack.store, "new")
    stack.store.set(CLIENT_KEY_PREFIX + "old", 10_000, px=4_000)
    stack.store.set(CLIENT_KEY_PREFIX + "endless", 10_000)
    stack.store.set(CLIENT_KEY_PREFIX + "garbage", "long", px=60_000)
    found = transport.silences(["new", "old", "endless", "garbage", "unknown"])
    assert found is not None and 0 <= found["new"] < 60 and 6.0 <= found["old"] <= 10.0  # type: ignore[operator]
    assert [found[name] for name in ("endless", "garbage", "unknown")] == [None] * 3
    # And nobody is taken for silent while the store is away
    with stack.away("store"):
        assert transport.silences(["new"]) is None
    assert wait_until(lambda: transport.silences(["new"]) == {"new": None}, 60)


def test_blobs_are_kept_dropped_and_expire(stack: Stack) -> None:
    transport, blobs = stack.open(), Blobs(stack.store, threshold_bytes=1, ttl_s=60)
    kept, dropped, short = blobs.put(b"kept"), blobs.put(b"dropped"), Blobs(stack.store, threshold_bytes=1, ttl_s=0.05).put(b"short")
    keys = [reference["$blob"] for reference in (kept, dropped, short)]  # type: ignore[index]
    # When one is kept for longer, one is dropped, and one's time is over
    transport.keep_blobs([keys[0], "tangram-blob-unknown"], 600)
    transport.keep_blobs([keys[1]], 0)
    # Then only the first is there
    assert blobs.get(kept) == b"kept" and 540_000 < stack.store.pttl(keys[0]) <= 600_000
    assert wait_until(lambda: stack.store.mget(keys)[1:] == [None, None], 60)
    with pytest.raises(ActionFailed, match="expired"):
        blobs.get(dropped)


def test_of_several_that_change_what_they_have_read_each_counts(stack: Stack) -> None:
    def add_one(change: Any) -> None:
        count = int(stack.store.get("count") or 0)
        change.multi()
        change.set("count", count + 1)

    def add(_: int) -> None:
        for _ in range(25):
            assert stack.store.transaction(add_one, "count") == [True]

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, range(4)))
    assert stack.store.get("count") == b"100"
    # And nothing is done where nothing is to be
    assert stack.store.transaction(lambda change: None, "count") == []


class Overtaken:
    """A store in which something happens after the first reader has read, and before that goes on."""

    def __init__(self, store: Any, happens: Callable[[], object]) -> None:
        self._store, self._happens = store, [happens]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, key: str) -> Any:
        value = self._store.get(key)
        if self._happens:
            self._happens.pop()()
        return value


def test_of_two_workers_that_find_a_dead_holder_of_their_name_one_has_it(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a name whose holder is gone, which is found by two workers
    monkeypatch.setattr("workers.unique_name._is_dead", lambda holder: holder == "dead")
    stack.store.set(NODE_KEY_PREFIX + "n", "dead")
    first = UniqueName(stack.store, "n", 60.0)
    second: Any = UniqueName(Overtaken(stack.store, first.take), "n", 0.01)  # type: ignore[arg-type]
    # When the first takes it as the second is about to; then the second is refused
    with pytest.raises(ConfigError, match="another worker is the node n"):
        second.take()
    # And takes nothing away on its way out
    second.release()
    assert stack.store.get(NODE_KEY_PREFIX + "n") is not None
    first.release()
    assert stack.store.get(NODE_KEY_PREFIX + "n") is None


def test_figures_are_shown_for_a_while(stack: Stack) -> None:
    transport = stack.open()
    assert read_shown(stack.store) is None
    transport.show({"policy": "fcfs"})
    shown = read_shown(stack.store)
    assert shown is not None and shown["policy"] == "fcfs" and 0 <= shown["shown_ago_s"] < SHOWN_TTL_S
    with stack.away("store"):
        transport.show({"policy": "elastic"})


def test_what_clients_submit_before_a_scheduler_comes_ends_with_their_results(stack: Stack) -> None:
    # Given two clients that submit more than one batch holds before anybody takes it
    one, two = stack.session(), stack.session()
    handles = [session.submit(Action(kind="my.task")) for _ in range(150) for session in (one, two)]
    handles.append(one.submit(Action(kind="my.task")))
    # When a scheduler comes, and workers store results, of which the last is no success
    received = take(stack.open(), lambda found: len(found) >= len(handles))
    for action in received:
        if action.id == handles[-1].id:
            stack.app.backend.store_result(action.id, {"pid": 1}, "STARTED")
            stack.app.backend.mark_as_failure(action.id, ActionLost("node n1 is lost"))
        else:
            stack.app.backend.store_result(action.id, action.id, "SUCCESS")
    # Then each client's came in order, and it has the results of its own
    for session in (one, two):
        own = [handle.id for handle in handles if handle.id.startswith(session.client_id)]
        assert [action.id for action in received if action.id.startswith(session.client_id)] == own
    assert [handle.result(60) for handle in handles[:-1]] == [handle.id for handle in handles[:-1]]
    with pytest.raises(ActionLost, match="n1"):
        handles[-1].result(60)


def test_broken_connections_lose_no_submission_and_no_result(stack: Stack) -> None:
    session, transport, seen = stack.session(), stack.open(), set[str]()
    handles: list[Any] = []
    for _ in range(2):
        # Given a client that submits while all connections break
        handles += [session.submit(Action(kind="my.task")) for _ in range(50)]
        stack.cut()
        handles += [session.submit(Action(kind="my.task")) for _ in range(50)]
        wanted = {handle.id for handle in handles}
        take(transport, lambda found: seen.update(one.id for one in found) or seen >= wanted)  # noqa: B023
        # And whose subscription breaks while results are being stored
        for number, handle in enumerate(handles[-100:]):
            if number == 50 and stack.name != "rabbitmq":
                stack.cut()
            stack.app.backend.store_result(handle.id, handle.id, "SUCCESS")
        assert [handle.result(60) for handle in handles] == [handle.id for handle in handles]
