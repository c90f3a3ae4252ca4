"""RabbitMQ as the broker, with results in Redis.

Runs where `TANGRAM_TEST_AMQP_URL` names a vhost that is free for tests, or where one may be made on this host.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from tangram import Action, ActionLost, Client, Settings


def missing(reason: str) -> None:
    """Skip on a laptop, fail in CI."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="module")
def amqp_url(real_component: None) -> Iterator[str]:
    """Return the address of an empty vhost."""
    url = os.environ.get("TANGRAM_TEST_AMQP_URL")
    if url:
        yield url
        return
    control = shutil.which("rabbitmqctl")
    if not control:
        missing("no RabbitMQ: set TANGRAM_TEST_AMQP_URL")
    vhost = f"tangram-test-{uuid4().hex[:8]}"
    made = subprocess.run([str(control), "add_vhost", vhost], capture_output=True, text=True, timeout=200, check=False)
    if made.returncode:
        missing(f"no RabbitMQ that takes orders: {made.stderr.strip() or made.stdout.strip()}")
    try:
        allow = [str(control), "set_permissions", "-p", vhost, "guest", ".*", ".*", ".*"]
        subprocess.run(allow, check=True, timeout=200, capture_output=True)
        yield f"amqp://guest:guest@127.0.0.1:5672/{vhost}"
    finally:
        subprocess.run([str(control), "delete_vhost", vhost], check=False, timeout=200, capture_output=True)


@pytest.fixture
def rabbit_peer(amqp_url: str, redis_urls: Any, make_peer: Any) -> Iterator[Any]:
    """Return a peer that consumes from RabbitMQ."""
    with make_peer(amqp_url, redis_urls.result).running() as running:
        yield running


@pytest.fixture
def settings(amqp_url: str, redis_urls: Any) -> Settings:
    """Return the settings of a client on RabbitMQ."""
    return Settings(broker_url=amqp_url, result_url=redis_urls.result, connect_timeout_s=60)


def test_actions_go_over_rabbitmq(rabbit_peer: Any, settings: Settings) -> None:
    with Client(settings=settings) as client, client.open(trajectory="t") as env:
        handles = [env.submit(f"echo {n}") for n in range(300)]
        assert [handle.result(60).stdout for handle in handles] == [f"echo {n}" for n in range(300)]
        client.cancel(trajectory="t")
        rabbit_peer.until(lambda: rabbit_peer.controls)


def test_errors_come_back(rabbit_peer: Any, settings: Settings) -> None:
    rabbit_peer.behave = lambda seen: ActionLost("node n1 is lost")
    with Client(settings=settings) as client, pytest.raises(ActionLost, match="n1"):
        client.submit(Action(kind="my.task")).result(30)


def test_submissions_wait_for_a_consumer(amqp_url: str, settings: Settings, redis_urls: Any, make_peer: Any) -> None:
    # Given nobody who consumes, and a client that is closed again
    with Client(settings=settings) as client:
        ids = [client.submit(Action(kind="my.task")).id for _ in range(3)]
    # When a consumer comes
    with make_peer(amqp_url, redis_urls.result).running() as peer:
        peer.until(lambda: len(peer.seen) == 3)
    # Then
    assert [seen.id for seen in peer.seen] == ids


def test_broken_connections_lose_no_submission(rabbit_peer: Any, settings: Settings, amqp_url: str) -> None:
    control = shutil.which("rabbitmqctl")
    if not control:
        missing("no rabbitmqctl to cut connections with")
    rabbit_peer.behave = lambda seen: seen.id
    with Client(settings=settings) as client:
        client.submit(Action(kind="my.task")).result(30)
        # When the broker cuts all connections while the client sends
        cut = subprocess.Popen(
            [str(control), "close_all_connections", "--vhost", amqp_url.rpartition("/")[2], "test"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        handles = []
        while cut.poll() is None:
            handles.append(client.submit(Action(kind="my.task")))
            handles[-1].result(60)
        handles.append(client.submit(Action(kind="my.task")))
        # Then
        assert [handle.result(60) for handle in handles] == [handle.id for handle in handles]
    if cut.returncode:
        missing("rabbitmqctl may not cut connections here")
