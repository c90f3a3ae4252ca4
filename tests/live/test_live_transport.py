"""The scheduler's end of the broker, on a Redis that stops answering at the worst moment, or behind a network that does."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from app.broker.transport import KombuTransport
from app.celery import make_app
from app.journal.writing import SqlJournal
from app.local.processes import wait_until
from app.scheduler_process import _app_of
from scheduler.core.core import Core
from scheduler.live.entries import ActionEnded, ActionGranted, ActionReceived, NodeChanged
from scheduler.live.service import Service
from scheduler.model import Limits, commands
from scheduler.model.events import StoredEnd
from scheduler.policies import make_policy
from tangram import Action, ActionCancelled, Settings
from tangram.wire import CLAIM_KEY_PREFIX, CLAIM_TTL_S, CONTROL_QUEUE, INGRESS_QUEUE, node_queue
from tests.conftest import RedisServer, RedisUrls
from tests.freezing import freeze
from tests.live.network import Network

ACTION = Action(kind="my.task")
MESSAGE = json.dumps(
    {"body": "W10=", "headers": {"id": "a"}, "properties": {"content_type": "application/json", "content_encoding": "utf-8"}}
)
NODE = {"name": "n", "kinds": ["cpu"], "labels": [], "cores": 4, "memory_mb": 0, "cells": 0, "cell_memory_mb": 0, "incarnation": "1"}


@pytest.fixture
def transport(own_redis: RedisServer) -> Iterator[KombuTransport]:
    """Return a transport that gives a server little time to answer."""
    settings = Settings(broker_url=own_redis.broker, result_url=own_redis.result, connect_timeout_s=5.0)
    transport = KombuTransport(make_app(settings), connect_timeout_s=5.0)
    yield transport
    transport.close()


def test_what_a_broker_that_hangs_may_not_have_got_is_sent_again(transport: KombuTransport, own_redis: RedisServer) -> None:
    # Given a node whose queue is known, and a server that stands still when the next order for it is to go out
    assert own_redis.process is not None
    transport.send_action("n", MESSAGE, {"attempt": 1})
    transport.flush()
    transport.send_action("n", MESSAGE, {"attempt": 2})
    freeze(own_redis.process.pid)
    # When it is sent
    try:
        transport.flush()
    finally:
        own_redis.process.send_signal(signal.SIGCONT)
    # Then the connection counts as lost, and the order goes out on the next one
    assert transport.lost_connections == 1
    assert wait_until(lambda: transport.receive(0.1) == [] and transport.caught_up, 60)
    transport.flush()
    with own_redis.client() as client:
        sent = client.lrange(node_queue("n"), 0, -1)
    assert {json.loads(message)["headers"]["grant"]["attempt"] for message in sent} == {1, 2}


class Touches:
    """What touches a file wherever its pickle is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_strangers_pickle_runs_nothing(transport: KombuTransport, tmp_path: Path) -> None:
    # Given a pickle in a queue of the scheduler, and a request behind it
    with transport._app.connection_for_write() as connection:
        for body, serializer in ((Touches(tmp_path / "touched"), "pickle"), ({"cancel": {"ids": ["a"]}}, "json")):
            connection.Producer().publish(body, exchange="", routing_key=CONTROL_QUEUE, serializer=serializer)
    # When both are taken; then the pickle was dropped unread
    received: list[Any] = []
    assert wait_until(lambda: received.extend(one.body for one in transport.receive(0.1)) or received, 60)
    assert received == [{"cancel": {"ids": ["a"]}}]
    assert not (tmp_path / "touched").exists()


def test_what_a_connection_takes_that_only_the_server_has_for_open_comes_back(
    network: Network, own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.broker.redis_intake.RESCUE_S", 0.1)
    settings = Settings(broker_url=network.url, result_url=own_redis.result, connect_timeout_s=8.0)
    with _app_of(settings) as app, own_redis.client() as client:
        transport = KombuTransport(app, connect_timeout_s=8.0)
        transport.receive(0.0)
        # Given a scheduler that has connected again after a cut of the network of which the server does not know
        network.cut()
        assert wait_until(lambda: transport.receive(0.1) == [] and transport.lost_connections == 1 and transport.caught_up, 60)
        # When an action comes, which goes to the connection that is dead, as that was first to wait
        headers = {"id": "a", "task": "my.task", "tangram": {"kind": "my.task"}}
        properties = {"delivery_tag": "1", "delivery_info": {}, "body_encoding": "base64"}
        message = {"body": "W10=", "headers": headers, "properties": properties, "content-type": "application/json"}
        client.lpush(INGRESS_QUEUE, json.dumps({**message, "content-encoding": "utf-8"}))
        # Then the scheduler has it soon, waits for nothing without a time limit, and keeps its connection
        found: list[str] = []

        def take() -> bool:
            received = transport.receive(0.1)
            found.extend(one.id for one in received)
            transport.acknowledge(received)
            return bool(found)

        assert wait_until(take, 60)
        assert (found, transport.lost_connections) == (["a"], 1)
        # And so are the actions after it
        client.lpush(INGRESS_QUEUE, json.dumps({**message, "content-encoding": "utf-8", "headers": {**headers, "id": "b"}}))
        assert wait_until(lambda: [one.id for one in transport.receive(0.1)] == ["b"], 60)
        transport.close()


def test_a_try_that_is_given_up_is_so_for_as_long_as_its_claim_lasts(transport: KombuTransport, own_redis: RedisServer) -> None:
    # Given a claim of an action with a long timeout, and none of another one
    long_s = 7 * CLAIM_TTL_S
    with own_redis.client() as store:
        store.set(f"{CLAIM_KEY_PREFIX}claimed:1", "a worker", ex=long_s)
        # When both are given up
        transport.disown("claimed", 1)
        transport.disown("unclaimed", 1)
        transport.flush()
        # Then that is known while the one runs, and when the other one's message comes late
        claimed, unclaimed = (f"{CLAIM_KEY_PREFIX}{name}:1" for name in ("claimed", "unclaimed"))
        assert store.get(claimed) == store.get(unclaimed) == b"disowned"
        assert store.ttl(claimed) > long_s - 60
        assert CLAIM_TTL_S - 60 < store.ttl(unclaimed) <= CLAIM_TTL_S


def test_an_end_whose_callback_cannot_be_sent_is_told_when_the_broker_is_back(own_redis: RedisServer, redis_urls: RedisUrls) -> None:
    settings = Settings(broker_url=own_redis.broker, result_url=redis_urls.result, connect_timeout_s=5.0)
    with _app_of(settings) as app:
        transport = KombuTransport(app, connect_timeout_s=5.0)
        # Given an action that ends without a worker, with a callback for that, and a broker that is away
        callback = app.signature("my.callback", options={"queue": "callbacks"})
        message = json.dumps({**json.loads(MESSAGE), "body": json.dumps([[], {}, {"errbacks": [callback]}])})
        own_redis.stop()
        transport.store_end("a", message, "lost", "its node was lost")
        # When its result is stored
        transport.flush()
        # Then its trainer knows, and the callback is made up for
        assert app.backend.get_state("a") == "FAILURE"
        own_redis.start()

        def told() -> bool:
            transport.flush()
            return not transport.ends_to_store

        assert wait_until(told, 60)
        with own_redis.client() as client:
            assert client.llen("callbacks") == 1
        transport.close()


def test_a_result_is_said_to_be_lost_only_where_there_is_none_and_none_comes(redis_urls: RedisUrls, own_redis: RedisServer) -> None:
    settings = Settings(broker_url=redis_urls.broker, result_url=own_redis.result, connect_timeout_s=5.0)
    with _app_of(settings) as app:
        transport = KombuTransport(app, connect_timeout_s=5.0)
        # Given actions that have ended: of one the result is stored, of one it is still to be, of one it has expired
        app.backend.store_result("stored", 7, "SUCCESS")
        transport.store_end("told", MESSAGE, "cancelled", "its trainer cancelled it", cause="cancelled")
        own_redis.stop()
        # When all are asked for again while the store is away, which comes back with what it had
        for action_id in ("stored", "told", "expired"):
            transport.tell_lost(action_id)
        transport.flush()
        own_redis.start()
        app.backend.store_result("stored", 7, "SUCCESS")
        assert wait_until(lambda: transport.flush() is None and app.backend.get_state("expired") == "FAILURE", 60)
        # Then only the last one is lost
        assert app.backend.get_result("stored") == 7
        kinds = dict.fromkeys(("told", "expired"), "my.task")
        assert {end.id: (end.status, end.cause) for end in transport.stored_ends(kinds)} == {
            "told": ("cancelled", "cancelled"),
            "expired": ("failed", "result_lost"),
        }
        transport.close()


@pytest.mark.parametrize(
    ("options", "headers"),
    [
        ({"serializer": "nobody's"}, {}),
        ({"compression": "nobody's"}, {}),
        ({"queue": {"no": "name"}}, {}),
        ({}, {"delivery_info": "a client's own words"}),
    ],
)
def test_an_end_whose_callback_can_never_be_sent_holds_up_no_other(
    redis_urls: RedisUrls, options: dict[str, Any], headers: dict[str, Any]
) -> None:
    with _app_of(Settings(broker_url=redis_urls.broker, result_url=redis_urls.result)) as app:
        transport = KombuTransport(app, connect_timeout_s=5.0)
        # Given two actions that end without a worker, of which the first asks for what nobody can do
        for action_id, its_options, its_headers in (("bad", options, headers), ("good", {}, {})):
            callback = app.signature("my.callback", options={"queue": "callbacks", **its_options})
            body = json.dumps([[], {}, {"errbacks": [callback]}])
            message = {**json.loads(MESSAGE), "body": body, "headers": {"id": action_id, **its_headers}}
            transport.store_end(action_id, json.dumps(message), "lost", "its node was lost")
        # When their results are stored
        assert wait_until(lambda: transport.flush() is None and not transport.ends_to_store, 60)
        # Then the trainers of both know, and what can be sent is
        assert [app.backend.get_state(action_id) for action_id in ("bad", "good")] == ["FAILURE", "FAILURE"]
        with redis_urls.client() as client:
            assert client.llen("callbacks") == (2 if headers else 1)
        transport.close()


def test_what_workers_have_stored_is_read_as_the_ends_it_tells_of(transport: KombuTransport, own_redis: RedisServer) -> None:
    settings = Settings(broker_url=own_redis.broker, result_url=own_redis.result)
    with make_app(settings) as app:
        act = {"queue_s": 0.5, "overhead_s": 0.1, "execution_s": 1.5}
        # Given results of all sorts, as workers store them
        for action_id, status in (("done", "succeeded"), ("late", "timed_out")):
            payload = {"status": status, "value": {"cpu_s": 1.25}, "reason": "why", "dop": 1, "act": act}
            app.backend.store_result(action_id, payload, "SUCCESS")
        app.backend.store_result("plain", {"status": "timed_out"}, "SUCCESS")
        app.backend.store_result("wrong", ValueError("no"), "FAILURE")
        app.backend.store_result("stopped", ActionCancelled("by the trainer"), "FAILURE")
        app.backend.store_result("running", None, "STARTED")
    # When those of some actions are asked for
    kinds = {"done": "cpu.exec", "late": "cpu.exec", "plain": "my.task", "wrong": "my.task", "stopped": "cpu.exec"}
    ends = transport.stored_ends({**kinds, "running": "cpu.exec", "missing": "cpu.exec"})
    # Then each that has ended is told, and no other
    assert ends == [
        StoredEnd(id="done", status="succeeded", reason="why", execution_s=1.5, cpu_s=1.25),
        StoredEnd(id="late", status="timed_out", reason="why", execution_s=1.5, cpu_s=1.25),
        StoredEnd(id="plain", status="succeeded"),
        StoredEnd(id="wrong", status="failed", reason="ValueError: no", cause="error"),
        StoredEnd(id="stopped", status="cancelled", reason="by the trainer", cause="cancelled"),
    ]


def test_the_next_scheduler_tells_the_ends_that_a_killed_one_had_only_written_down(
    transport: KombuTransport, own_redis: RedisServer, engine: Engine
) -> None:
    # Given an action that a scheduler ended in its journal, whose trainer it had no time to tell
    now = time.time()
    with SqlJournal(engine) as journal, make_app(Settings(broker_url=own_redis.broker, result_url=own_redis.result)) as app:
        parts = {"queue_s": 0.0, "overhead_s": 0.0, "execution_s": 0.0, "cpu_s": 0.0, "dop": 0, "started_at": None}
        end = commands.Finish(id="a", status="cancelled", reason="by the trainer", by_worker=False, **parts)  # type: ignore[arg-type]
        received = ActionReceived(id="a", header=ACTION.to_header(), message=MESSAGE, submitted_at=now, received_at=now)
        journal.write([received, ActionEnded(end=end, at=now)])
        # When the next one begins
        service = Service(Core(make_policy("fcfs")), transport, journal, epoch=2)
        service.recover()
        # Then the trainer has its end
        assert repr(app.backend.get_result("a")) == repr(ActionCancelled("by the trainer"))
        # And it is told once
        service.step()
        assert journal.unfinished().unpublished == ()


def test_a_node_that_died_between_a_result_and_its_report_has_ended_the_action(
    transport: KombuTransport, own_redis: RedisServer, engine: Engine
) -> None:
    # Given a scheduler with two actions on a node, of which one has its result
    now = time.time()
    with SqlJournal(engine) as journal, make_app(Settings(broker_url=own_redis.broker, result_url=own_redis.result)) as app:
        journal.write([NodeChanged(name="n", state="up", description=NODE, at=now)])
        for action_id in ("done", "cut"):
            journal.write(
                [
                    ActionReceived(id=action_id, header=ACTION.to_header(), message=MESSAGE, submitted_at=now, received_at=now),
                    ActionGranted(id=action_id, attempt=1, node="n", units=1, core_ids=(), cell_ids=(), granted_at=now),
                ]
            )
        app.backend.store_result("done", "what it returned", "SUCCESS")
        clock = iter(range(1000))
        service = Service(
            Core(make_policy("fcfs"), limits=Limits(beat_s=0.1)), transport, journal, epoch=2, clock=lambda: now + 0.2 * next(clock)
        )
        service.recover()

        def ended() -> dict[str, str]:
            service.step()
            with engine.connect() as connection:
                rows = connection.exec_driver_sql("select id, status from actions where ended_at is not null")
                return {row.id: row.status for row in rows}

        # When the node is not heard of any more
        assert wait_until(lambda: len(ended()) == 2, 60)
        # Then only the other one is lost, in the journal as for its trainer
        assert ended() == {"done": "succeeded", "cut": "lost"}
        assert (app.backend.get_state("done"), app.backend.get_state("cut")) == ("SUCCESS", "FAILURE")
