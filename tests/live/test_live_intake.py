"""Taking messages on Redis: in order, none lost, whenever the taker dies."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest
from redis import ConnectionPool, RedisError, UnixDomainSocketConnection

from app.broker import redis_intake
from app.broker.redis_intake import RedisIntake
from app.local.processes import wait_until
from tests.conftest import RedisServer, RedisUrls
from tests.live.network import Network

QUEUES = ("a", "b")


@pytest.fixture
def intake(redis_urls: RedisUrls) -> Iterator[RedisIntake]:
    pool = ConnectionPool(connection_class=UnixDomainSocketConnection, path=str(redis_urls.socket))
    with closing(RedisIntake(pool, QUEUES, 1)) as intake:
        yield intake


def take_all(intake: RedisIntake, count: int) -> dict[str, list[int]]:
    """Take and acknowledge so many messages, and return their numbers by queue, in the order in which they came."""
    found: dict[str, list[int]] = {queue: [] for queue in QUEUES}

    def enough() -> bool:
        taken = intake.take(0.05, 16)
        for name, message in taken:
            found[name.split(":", 2)[2]].append(int(message))
        intake.settle({}, taken)
        return sum(map(len, found.values())) >= count

    assert wait_until(enough, 100)
    return found


def is_left_to_the_next(pool: ConnectionPool, number: int) -> bool:
    with closing(RedisIntake(pool, QUEUES, 1, 1)) as later:
        return take_all(later, 1) == {"a": [number], "b": []}


def test_each_queue_keeps_its_order_while_others_send(intake: RedisIntake, redis_urls: RedisUrls) -> None:
    # Given two senders at work on two queues
    count = 600

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


def test_where_no_others_come_lately_none_are_looked_for(
    intake: RedisIntake, redis_urls: RedisUrls, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given an intake that looks for messages with a priority only at first, and messages that come in pairs while it waits
    monkeypatch.setattr(redis_intake, "_LOOK_S", 3600.0)
    wait = intake._ready
    assert intake.take(0.0, 16) == []
    with redis_urls.client() as client, client.pipeline() as pair:

        def send_and_wait(timeout_s: float) -> set[str]:
            if timeout_s > 0:
                pair.lpush("a", 5).lpush("b", 6).execute()
            return wait(timeout_s)

        monkeypatch.setattr(intake, "_ready", send_and_wait)
        for _ in range(redis_intake.ONE_BY_ONE):
            intake.settle({}, intake.take(30.0, 16))
        client.config_resetstat()
        # When another pair comes, then both are taken, and nothing else was asked
        taken = intake.take(30.0, 16)
        assert sorted(message for _, message in taken) == [b"5", b"6"]
        assert "cmdstat_evalsha" not in client.info("commandstats")
        # When there are some for which it has not waited, then all are taken at once
        intake.settle({}, taken)
        client.lpush("a", 7, 8, 9)
        monkeypatch.setattr(intake, "_ready", wait)
        assert take_all(intake, 3) == {"a": [7, 8, 9], "b": []}
        assert client.info("commandstats")["cmdstat_evalsha"]["calls"] == 1


def test_what_cannot_be_sent_is_not_acknowledged(own_redis: RedisServer) -> None:
    # Given a message that was taken, and a server that has no memory left
    pool = ConnectionPool(connection_class=UnixDomainSocketConnection, path=str(own_redis.socket))
    with own_redis.client() as client, closing(RedisIntake(pool, QUEUES, 1)) as intake:
        client.lpush("a", 7)
        taken = intake.take(30.0, 16)
        client.config_set("maxmemory", 1)
        # When it is answered, then neither is done, and the next one gets it
        with pytest.raises(RedisError):
            intake.settle({"answers": [b"8"]}, taken)
        client.config_set("maxmemory", 0)
        assert client.llen("answers") == 0
    assert is_left_to_the_next(pool, 7)


def test_an_answer_that_never_comes_is_waited_for_no_longer_than_any_other(network: Network, own_redis: RedisServer) -> None:
    # Given a taker whose blocking moves are cut off, though it reaches the server on another connection
    pool = ConnectionPool(connection_class=UnixDomainSocketConnection, path=str(network.path), socket_timeout=5.0)
    with own_redis.client() as client, closing(RedisIntake(pool, QUEUES, 1)) as intake:
        assert intake.take(0.0, 16) == []
        assert wait_until(lambda: client.info("clients")["blocked_clients"] == len(QUEUES), 60)
        network.cut()
        pool.disconnect()
        # When the server serves one of them; then the taker hears that its connection is broken, and the message comes back
        client.lpush("a", 7)
        with pytest.raises(RedisError):
            wait_until(lambda: bool(intake.take(0.1, 16)), 60)
    assert is_left_to_the_next(pool, 7)


def test_a_process_with_many_open_files_takes_messages(redis_urls: RedisUrls) -> None:
    # Given a process whose next descriptor is above 1024
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, limits[1]))
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        while (descriptor := os.dup(0)) < 1024:
            stack.callback(os.close, descriptor)
        stack.callback(os.close, descriptor)
        pool = ConnectionPool(connection_class=UnixDomainSocketConnection, path=str(redis_urls.socket))
        intake = stack.enter_context(closing(RedisIntake(pool, QUEUES, 1)))
        stack.enter_context(redis_urls.client()).lpush("a", 3)
        assert take_all(intake, 1)["a"] == [3]


def test_messages_with_a_priority_are_taken_too(intake: RedisIntake, redis_urls: RedisUrls) -> None:
    with redis_urls.client() as client:
        client.lpush("a\x06\x166", 3)
    assert take_all(intake, 1)["a"] == [3]
