"""Connections to RabbitMQ while it lacks memory or disk, and so takes no messages."""

from __future__ import annotations

import select
import threading

from kombu import Connection

_blocked = threading.local()
"""`socket`: the connection on which RabbitMQ has told this thread that it takes no messages."""


def break_where_blocked(connection: Connection) -> None:
    """Have a connection that sends break once RabbitMQ lacks memory or disk, since RabbitMQ reads nothing more of it then.

    RabbitMQ does not even notice the end of such a connection, and would keep that of every try. So it stays open. Until RabbitMQ sends
    something on it, the thread has no other: this raises `ConnectionError` meanwhile.
    """
    if not connection.supports_heartbeats:
        return
    if (blocked := getattr(_blocked, "socket", None)) is not None:
        poller = select.poll()
        poller.register(blocked, select.POLLIN)
        if not poller.poll(0):
            raise ConnectionError("it takes no messages yet")
        blocked.close()
        _blocked.socket = None
    amqp = connection.connection

    def give_up(reason: str) -> None:
        _blocked.socket, amqp.transport = amqp.transport.sock, None
        amqp.collect()  # closing would wait for an answer
        raise ConnectionError(f"it takes no messages: {reason}")

    amqp.on_blocked = give_up
