"""The scheduler's end of the broker, on a Redis that stops answering at the worst moment."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator

import pytest

from app.celery import make_app
from app.processes import wait_until
from app.transport import KombuTransport
from tangram import Settings
from tangram.wire import node_queue
from tests.conftest import RedisServer

MESSAGE = json.dumps(
    {"body": "W10=", "headers": {"id": "a"}, "properties": {"content_type": "application/json", "content_encoding": "utf-8"}}
)


@pytest.fixture
def transport(own_redis: RedisServer) -> Iterator[KombuTransport]:
    """Return a transport that gives a server little time to answer."""
    settings = Settings(broker_url=own_redis.broker, result_url=own_redis.result, connect_timeout_s=0.5)
    transport = KombuTransport(make_app(settings), connect_timeout_s=0.5)
    yield transport
    transport.close()


def test_what_a_broker_that_hangs_may_not_have_got_is_sent_again(transport: KombuTransport, own_redis: RedisServer) -> None:
    # Given a node whose queue is known, and a server that stands still when the next order for it is to go out
    assert own_redis.process is not None
    transport.send_action("n", MESSAGE, {"attempt": 1})
    transport.flush()
    transport.send_action("n", MESSAGE, {"attempt": 2})
    own_redis.process.send_signal(signal.SIGSTOP)
    # When it is sent
    try:
        transport.flush()
    finally:
        own_redis.process.send_signal(signal.SIGCONT)
    # Then the connection counts as lost, and the order goes out on the next one
    assert transport.lost_connections == 1
    assert wait_until(lambda: transport.receive(0.1) == [] and transport.caught_up, 20)
    transport.flush()
    with own_redis.client() as client:
        sent = client.lrange(node_queue("n"), 0, -1)
    assert {json.loads(message)["headers"]["grant"]["attempt"] for message in sent} == {1, 2}
