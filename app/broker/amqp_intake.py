"""Taking messages on AMQP: a consumer with a bounded prefetch, and heartbeats.

The broker pushes messages and keeps each until it is acknowledged; when the connection is gone, whether by a killed
process or by missed heartbeats, it hands them out again. Nothing else is needed so that none is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from kombu import Connection, Consumer, Queue
from kombu.message import Message

from tangram import clock
from tangram.rabbitmq import break_where_blocked

HEARTBEAT_S = 30
"""A connection that is silent for two of these is dead; the scheduler's loop turns far more often."""

_CHECK_S = 1.0
_MORE_S = 0.0005
_TOLD_S = 0.1
_NOBODY = "tangram-nobody"
"""A queue that does not exist. What is sent to it shows whether the broker takes messages."""


class AmqpIntake:
    """Consumes `queues` over a connection, which it owns from now on. For one thread."""

    def __init__(self, connection: Connection, queues: Sequence[Queue], most: int) -> None:
        """Declare the queues and begin to consume; at most `2 * most` messages of each are unacknowledged at once."""
        self._connection = connection
        self._channel = connection.channel()
        self._found: list[Message] = []
        bound = [queue(self._channel) for queue in queues]
        for queue in bound:
            queue.declare()
        consumer = Consumer(self._channel, bound, on_message=self._found.append, accept=["json"])
        consumer.qos(prefetch_count=2 * most)
        consumer.consume()
        self._check = heartbeats(connection)

    def take(self, timeout_s: float, most: int) -> list[Message]:
        """Return what is there, at most about `most`, after waiting up to `timeout_s` for the first message."""
        self._check()
        with suppress(TimeoutError):
            self._connection.drain_events(timeout=max(timeout_s, 0.001))
            while len(self._found) < most:
                self._connection.drain_events(timeout=_MORE_S)
        found = list(self._found)
        self._found.clear()
        return found

    def acknowledge(self, taken: Sequence[Message]) -> None:
        """Forget messages for good; those of an earlier connection come again."""
        for message in taken:
            if message.channel is self._channel:
                message.ack()

    def close(self) -> None:
        """Give the connection back; the broker hands out again what was not acknowledged."""
        self._connection.release()


def sender_heartbeats(connection: Connection) -> Callable[[], None]:
    """Return what `heartbeats` returns, for a connection that sends. It also raises while RabbitMQ takes no messages, as does this call.

    RabbitMQ says that it lacks memory or disk only to those who have sent something. A scheduler that is not told would take all nodes
    for silent.
    """
    if not connection.supports_heartbeats:
        return heartbeats(connection)
    break_where_blocked(connection)
    channel = connection.channel()

    def probe() -> None:
        channel.basic_publish(channel.prepare_message(b""), exchange="", routing_key=_NOBODY)

    probe()
    with suppress(TimeoutError):
        connection.drain_events(timeout=_TOLD_S)
    return heartbeats(connection, probe)


def heartbeats(connection: Connection, probe: Callable[[], object] = lambda: None) -> Callable[[], None]:
    """Return what is to be called in every turn of a loop so that `connection` lives; it raises when the broker is gone."""
    due = [0.0]

    def check() -> None:
        now = clock.monotonic()
        if not connection.supports_heartbeats or now < due[0]:
            return
        due[0] = now + _CHECK_S
        probe()
        with suppress(TimeoutError):
            # Who only sends must read, too: the broker's heartbeats count when they are read.
            connection.drain_events(timeout=_MORE_S)
        connection.heartbeat_check()

    return check
