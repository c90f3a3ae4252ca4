"""A node's consumer when the broker goes away."""

from __future__ import annotations

import logging
from types import SimpleNamespace

from celery import Celery
from kombu import Consumer, Message, Queue

from tests.conftest import RedisServer
from workers.consumer import NodeConsumer

log = logging.getLogger(__name__)


def test_messages_of_a_connection_that_was_given_up_do_no_harm(own_redis: RedisServer) -> None:
    # Given messages that came over a connection, and are not acknowledged
    app = Celery(broker=own_redis.broker, set_as_current=False)
    connection = app.connection_for_read()
    messages: list[Message] = []
    with connection.clone() as other, other.SimpleQueue("q") as queue:
        for _ in range(3):
            queue.put({})
    tasks = Consumer(connection, [Queue("q")], on_message=messages.append, prefetch_count=10)
    tasks.consume()
    while len(messages) < 3:
        connection.drain_events(timeout=30)
    consumer = NodeConsumer.__new__(NodeConsumer)
    consumer.app, consumer.connection, consumer.task_consumer = app, connection, tasks
    consumer.qos_global, consumer.prefetch_multiplier, consumer.pool = True, 0, SimpleNamespace(num_processes=1)
    # When Redis is gone, and the connection is given up
    own_redis.stop()
    consumer.on_connection_error_after_connected(ConnectionError("gone"))
    # Then one may still be acknowledged or refused, as the loop does later
    errors = connection.connection_errors
    messages[0].ack_log_error(log, errors)
    messages[1].reject_log_error(log, errors)
    app.close()
