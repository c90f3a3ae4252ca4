"""The scheduler's end of the broker, on a Redis that stops answering at the worst moment, or behind a network that does."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from celery.app.task import Context
from redis import ResponseError
from sqlalchemy import create_engine

from app.action_task import Call
from app.broker.transport import KombuTransport
from app.celery import make_app
from app.gateway.context import Gateway
from app.local.processes import wait_until
from app.preconditions import require_store
from app.scheduler_process import _app_of
from tangram import Settings
from tangram.connection import open_store
from tangram.wire import INGRESS_QUEUE, node_queue
from tests.conftest import RedisServer, RedisUrls
from tests.freezing import freeze
from tests.live.network import Network

MESSAGE = json.dumps(
    {"body": "W10=", "headers": {"id": "a"}, "properties": {"content_type": "application/json", "content_encoding": "utf-8"}}
)


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


def test_a_result_and_the_report_of_its_end_are_there_at_once_and_once(own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    app = make_app(Settings(broker_url=own_redis.broker, result_url=own_redis.broker))
    transport = KombuTransport(app, connect_timeout_s=30.0)
    offer, lost = app.backend._offer, list[bool]()

    def lose_first_answer(*offered: Any) -> bool:
        stands = bool(offer(*offered))
        if not lost:
            lost.append(stands)
            raise ConnectionError("the answer is lost")
        return stands

    def store(value: int) -> Call:
        times = {"started_at": 5.0, "began": 0.0, "execution_s": 2.0, "sent_at": 6.0}
        call = Call(id="a", grant={"attempt": 3}, header={}, **times)  # type: ignore[typeddict-item, arg-type]
        app.backend.store_result("a", value, "SUCCESS", request=Context(grant={"attempt": 3}, tangram_call=call))
        return call

    # When a result is stored whose answer is lost at first, and then another one
    monkeypatch.setattr(app.backend, "_offer", lose_first_answer)
    calls = [store(value) for value in (1, 2)]
    # Then the scheduler is told of the first, once; the other is refused, and its node tells of it by itself
    assert lost == [True]
    assert [(call.end_is_told, call.refused) for call in calls] == [(True, False), (False, True)]
    [received] = transport.receive(30.0)
    # And before that when its request went out, which counts only before the end
    sent, end = received.body["events"]
    assert sent == {"type": "sent", "id": "a", "attempt": 3, "at": 6.0}
    assert (end["type"], end["id"], end["attempt"], end["execution_s"]) == ("finished", "a", 3, 2.0)
    assert transport.receive(0.0) == []
    transport.close()


def test_many_results_at_once_wait_their_turn(own_redis: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    app = make_app(Settings(broker_url=own_redis.broker, result_url=own_redis.result, connect_timeout_s=60.0))
    many, asking = 150, list[int]()
    assert own_redis.process is not None

    def store(number: int) -> None:
        asking.append(number)
        app.backend.store_result(f"a{number}", number, "SUCCESS")

    # Given a store that is slow to answer, and more threads that have a result for it than there are connections
    freeze(own_redis.process.pid)
    with ThreadPoolExecutor(many) as threads:
        stored = threads.map(store, range(many))
        try:
            assert wait_until(lambda: len(asking) == many, 60)
        finally:
            own_redis.process.send_signal(signal.SIGCONT)
        assert list(stored) == [None] * many
    # Then none takes it for away
    assert [record.message for record in caplog.records] == []


def test_what_a_connection_takes_that_only_the_server_has_for_open_comes_back(
    network: Network, own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.broker.redis_intake.RESCUE_S", 0.1)
    settings = Settings(broker_url=network.url, result_url=own_redis.result, connect_timeout_s=30.0)
    with _app_of(settings) as app, own_redis.client() as client:
        transport = KombuTransport(app, connect_timeout_s=30.0)
        transport.receive(0.0)
        # Given a scheduler that has connected again after a cut of the network of which the server does not know
        network.cut_unknown_to_the_server()
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
            transport.flush(received)
            return bool(found)

        assert wait_until(take, 60)
        assert (found, transport.lost_connections) == (["a"], 1)
        # And so are the actions after it
        client.lpush(INGRESS_QUEUE, json.dumps({**message, "content-encoding": "utf-8", "headers": {**headers, "id": "b"}}))
        assert wait_until(lambda: [one.id for one in transport.receive(0.1)] == ["b"], 60)
        transport.close()


OF_A_SCRIPT = "ERR Error running script (call to f_0): @user_script: 1: -READONLY You can't write against a read only replica."
REFUSED = {"command": ("RPUSH", "list", "x"), "script of Redis 6": ("EVAL", f'return {{err="{OF_A_SCRIPT}"}}', "0")}


@pytest.mark.parametrize("refused", REFUSED.values(), ids=REFUSED)
def test_a_redis_that_only_reads_after_a_failover_is_left(own_redis: RedisServer, redis_urls: RedisUrls, refused: tuple[str, ...]) -> None:
    # Given an address at which one Redis is, and then another
    address = own_redis.socket.parent / "address"
    address.symlink_to(own_redis.socket)
    url = f"redis+socket://{address}?virtual_host=0"
    settings = Settings(broker_url=url, result_url=url)

    async def of_gateway(*command: str) -> object:
        return await gateway.store.execute_command(*command)

    gateway = Gateway(settings, create_engine("sqlite://"))
    stores = [open_store(url, 5.0, 1).execute_command, make_app(settings).backend.client.execute_command]
    with asyncio.Runner() as runner, own_redis.client() as first:
        stores.append(lambda *command: runner.run(of_gateway(*command)))
        assert all(store("SET", "a", 1) for store in stores)
        address.unlink()
        address.symlink_to(redis_urls.socket)
        # When the first becomes a replica, which ends no connection
        first.replicaof("127.0.0.1", "1")
        for store in stores:
            with pytest.raises(ResponseError, match="read only replica"):
                store(*refused)
        # Then each writes to the other one, and nothing was sent twice
        assert [store("RPUSH", "list", "x") for store in stores] == [1, 2, 3]
        runner.run(gateway.store.aclose())


def test_a_redis_that_may_drop_keys_is_complained_of(own_redis: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    with own_redis.client() as client:
        require_store(client, own_redis.result)
        assert not caplog.messages
        client.config_set("maxmemory-policy", "volatile-lru")  # as managed services have it
        require_store(client, own_redis.result)
    assert "maxmemory-policy volatile-lru" in caplog.text
