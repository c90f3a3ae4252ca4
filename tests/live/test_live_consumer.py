"""A node's consumer: how it takes messages on Redis, and on one that answers with errors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery, _state
from celery.contrib.testing.worker import start_worker
from redis import Redis, ResponseError

from app.celery import configuration
from app.local.processes import wait_until
from tangram import Settings
from tangram.wire import RESULT_KEY_PREFIX
from tests.conftest import RedisServer
from workers.consumer import queue_of

TROUBLES: dict[str, tuple[Callable[[Redis], Any], Callable[[Redis], Any]]] = {
    "OOM": (lambda redis: redis.config_set("maxmemory", 1), lambda redis: redis.config_set("maxmemory", 0)),
    "READONLY": (lambda redis: redis.replicaof("127.0.0.1", 1), lambda redis: redis.replicaof("NO", "ONE")),
}


@pytest.fixture(autouse=True)
def process_as_before() -> Iterator[None]:
    """Undo what Celery's worker sets for the whole process: how much is logged and where, and which app is at hand."""
    root, app, default = logging.getLogger(), getattr(_state._tls, "current_app", None), _state.default_app
    level, handlers = root.level, root.handlers[:]
    yield
    root.setLevel(level)
    root.handlers[:] = handlers
    _state._tls.current_app, _state.default_app = app, default


def app_of_node(name: str, redis: RedisServer) -> Celery:
    """Return an application whose workers take messages as the node `n` does."""
    app = Celery(name, broker=redis.broker, backend=redis.result, set_as_current=False)
    app.conf.update(configuration(Settings()))
    app.loader.override_backends = {"redis": "app.broker.results:RedisResults"}
    app.conf.update(worker_consumer="workers.consumer:NodeConsumer", task_queues=[queue_of("n")], broker_connection_timeout=5.0)
    return app


@pytest.mark.parametrize("version", [7, 6])
def test_a_node_takes_what_waits_with_one_command_where_redis_has_one(own_redis: RedisServer, version: int) -> None:
    # Given a Redis that knows the command or not, and messages that wait in the queue, with one among them that nobody can read
    if version < 7:
        own_redis.stop()
        own_redis.start("--rename-command", "BLMPOP", "")
    app, ran = app_of_node(f"version {version}", own_redis), list[int]()
    app.conf.broker_transport_options["polling_interval"] = 1000  # no command ends because nothing has come for a while

    @app.task(name=f"my.{version}")  # type: ignore[untyped-decorator]
    def task(number: int) -> None:
        ran.append(number)

    with own_redis.client() as redis:
        for number in range(100):
            app.send_task(task.name, (number,), queue="node.n", ignore_result=True)
            if number == 10:
                redis.lpush("node.n", "no message")
        redis.config_resetstat()
        # When the node takes them with one thread, then each runs once, in order
        with start_worker(app, pool="threads", concurrency=1, perform_ping_check=False, shutdown_timeout=60.0):
            assert wait_until(lambda: len(ran) >= 100, 60)
            app.send_task(task.name, (100,), queue="node.n", ignore_result=True)
            assert wait_until(lambda: len(ran) >= 101, 60)
        assert ran == [*range(101)]
        # And many came with each command, or one with each
        calls = {name: redis.info("commandstats").get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("blmpop", "brpop")}
    assert (0 < calls["blmpop"] < 5 and not calls["brpop"]) if version == 7 else calls["brpop"] > 100


@pytest.mark.parametrize("trouble", TROUBLES)
def test_errors_of_redis_end_no_worker_and_a_result_waits_until_it_is_stored(own_redis: RedisServer, trouble: str) -> None:
    # Given a worker on a Redis, and a task that is running when the trouble begins
    begin, end = TROUBLES[trouble]
    app = app_of_node(trouble, own_redis)
    began: list[str] = []

    def errors(redis: Redis) -> int:
        return int(redis.info("errorstats")[f"errorstat_{trouble}"]["count"])

    @app.task(name=f"my.{trouble}", bind=True)  # type: ignore[untyped-decorator]
    def task(self: Any) -> str:
        with own_redis.client() as redis:
            if not began:
                begin(redis)
                began.append(self.request.id)
        return "done"

    with own_redis.client() as redis, start_worker(app, pool="threads", perform_ping_check=False, shutdown_timeout=60.0):
        first = app.send_task(task.name, queue="node.n")
        try:
            assert wait_until(lambda: bool(began), 60)
            # Then Redis takes nothing, neither the consumer's commands nor the result
            with pytest.raises(ResponseError):
                redis.set("x", "y")
            seen = errors(redis)
            assert wait_until(lambda: errors(redis) > seen + 2, 60) and not redis.exists(RESULT_KEY_PREFIX + first.id)
        finally:
            end(redis)
        # When the trouble is over, then the result is there, and the worker runs what comes, of which nothing is left to be acknowledged
        assert first.get(60) == "done"
        assert app.send_task(task.name, queue="node.n").get(60) == "done"
        assert not redis.exists("unacked", "unacked_index")
