"""Taking messages on Redis: in order, none lost, whenever the taker dies."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from redis import ConnectionPool, RedisError, UnixDomainSocketConnection

from app.broker import redis_intake
from app.broker.redis_intake import RedisIntake
from app.local.processes import wait_until
from tests.conftest import RedisServer
from tests.live.network import Network

QUEUES = ("a", "b")
Open = Callable[[int], RedisIntake]


@pytest.fixture
def open_intake(redis_urls: Any) -> Iterator[Open]:
    """Return what opens an intake of an epoch."""
    opened = []

    def start(epoch: int) -> RedisIntake:
        pool = ConnectionPool(connection_class=UnixDomainSocketConnection, path=str(redis_urls.socket))
        opened.append(RedisIntake(pool, QUEUES, epoch))
        return opened[-1]

    yield start
    for intake in opened:
        intake.close()


def take_all(intake: RedisIntake, count: int) -> dict[str, list[int]]:
    """Take and acknowledge so many messages, and return their numbers by queue, in the order in which they came."""
    found: dict[str, list[int]] = {queue: [] for queue in QUEUES}

    def enough() -> bool:
        taken = intake.take(0.05, 16)
        for name, message in taken:
            found[name.split(":", 2)[2]].append(int(message))
        intake.acknowledge(taken)
        return sum(map(len, found.values())) >= count

    assert wait_until(enough, 100)
    return found


def test_each_queue_keeps_its_order_while_others_send(open_intake: Open, redis_urls: Any) -> None:
    # Given two senders at work on two queues
    intake, count = open_intake(1), 600

    def send(queue: str) -> None:
        with redis_urls.client() as client:
            for number in range(0, count, 3):
                with client.pipeline(transaction=False) as pipe:
                    for one in range(number, number + 3):
                        pipe.lpush(queue, one)
                    pipe.execute()

    senders = [threading.Thread(target=send, args=(queue,)) for queue in QUEUES]
    for sender in senders:
        sender.start()
    # When all is taken meanwhile
    found = take_all(intake, 2 * count)
    for sender in senders:
        sender.join()
    # Then each queue came in order, whole and once, and nothing is left
    assert found == {queue: list(range(count)) for queue in QUEUES}
    with redis_urls.client() as client:
        assert client.keys("tangram-taken:*") == []


def test_a_message_that_comes_alone_costs_one_round_trip(open_intake: Open, redis_urls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given an intake that looks for messages with a priority only at first; messages that came one by one; another as soon as it waits
    monkeypatch.setattr(redis_intake, "_LOOK_S", 3600.0)
    intake, wait = open_intake(1), select.select
    with redis_urls.client() as client:
        for number in range(redis_intake.ONE_BY_ONE):
            client.lpush("a", number)
            take_all(intake, 1)

        def send_and_wait(*sockets_and_timeout: Any) -> Any:
            if sockets_and_timeout[-1] > 0:
                client.lpush("a", 5)
            return wait(*sockets_and_timeout)

        monkeypatch.setattr(select, "select", send_and_wait)
        client.config_resetstat()
        # When it is taken and acknowledged
        taken = intake.take(30.0, 16)
        intake.acknowledge(taken)
        # Then it was moved and forgotten, and nothing else was asked
        asked = {name: figures["calls"] for name, figures in client.info("commandstats").items()}
        asked_of_intake = {name: calls for name, calls in asked.items() if name not in ("cmdstat_lpush", "cmdstat_config|resetstat")}
    assert [message for _, message in taken] == [b"5"]
    assert asked_of_intake == {"cmdstat_lrem": 1, "cmdstat_blmove": 1}
    assert intake.take(0.0, 16) == []


def test_an_answer_that_never_comes_is_waited_for_no_longer_than_any_other(network: Network, own_redis: RedisServer) -> None:
    # Given a taker whose blocking moves are cut off, though it reaches the server on another connection
    pool = ConnectionPool(connection_class=UnixDomainSocketConnection, path=str(network.path), socket_timeout=5.0)
    intake = RedisIntake(pool, QUEUES, 1)
    assert intake.take(0.0, 16) == []
    with own_redis.client() as client:
        assert wait_until(lambda: client.info("clients")["blocked_clients"] == len(QUEUES), 60)
        network.cut()
        pool.disconnect()
        # When the server serves one of them
        client.lpush("a", 7)
    # Then the taker hears that its connection is broken, and the message comes back
    with pytest.raises(RedisError):
        wait_until(lambda: bool(intake.take(0.1, 16)), 60)
    intake.close()
    later = RedisIntake(pool, QUEUES, 1, 1)
    assert take_all(later, 1)["a"] == [7]
    later.close()


def test_messages_with_a_priority_are_taken_too(open_intake: Open, redis_urls: Any) -> None:
    intake = open_intake(1)
    with redis_urls.client() as client:
        client.lpush("a\x06\x166", 3)
    assert take_all(intake, 1)["a"] == [3]
