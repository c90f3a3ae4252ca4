"""The scheduler's end of the broker, on a Redis that stops answering at the worst moment, or behind a network that does."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator

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
from scheduler.policies import make_policy
from tangram import Action, ActionCancelled, Settings
from tangram.wire import INGRESS_QUEUE, node_queue
from tests.conftest import RedisServer
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
