"""The Celery consumer of a node: Celery's own, but it outlives every outage of the broker and is quicker to come back.

| Celery | a node |
|---|---|
| waits two seconds longer after each failure, up to half a minute | tries again within a second: so long it beats and consumes nothing |
| acknowledges each message | acknowledges none: the queue has `no_ack`, and beats show what was lost on the way |
| takes one message for each round trip, on Redis | takes all that wait (`node_channel.py`) |

A broker that answers with errors, such as a Redis without memory or one that only reads, is away like one that does not answer.
"""

from __future__ import annotations

import warnings
from typing import Any

from celery.exceptions import CPendingDeprecationWarning
from celery.utils.log import get_logger
from celery.worker.consumer import Consumer
from celery.worker.state import maybe_shutdown
from kombu import Queue
from kombu.transport import redis

from app.action_task import NodeRuntime
from app.runtime import runtime
from tangram import clock
from tangram.wire import direct_queue, node_queue
from workers.node import Node
from workers.node_channel import NodeChannel

log = get_logger(__name__)

_FIRST_PAUSE_S, _PAUSE_STEP_S, _LONGEST_PAUSE_S = 0.1, 0.2, 1.0


def queue_of(node: str) -> Queue:
    """Return the queue of a node, as its worker consumes it."""
    queue = direct_queue(node_queue(node))
    queue.no_ack = True
    return queue


class NodeConsumer(Consumer):  # type: ignore[misc]
    """Connects to the broker for as long as it takes."""

    def call_soon_ack(self, *args: Any, **kwargs: Any) -> None:
        """Acknowledge nothing; Celery's own would wake the loop that takes messages once more for each."""

    def create_task_handler(self, *args: Any, **kwargs: Any) -> Any:
        """Return what takes messages, once it has taken those of actions that are gone on with."""
        take = super().create_task_handler(*args, **kwargs)
        node = runtime().part(NodeRuntime)  # type: ignore[type-abstract]
        while isinstance(node, Node) and node.resumed:
            take(node.resumed.pop())
        return take

    def on_connection_error_after_connected(self, exc: BaseException) -> None:
        """Give a broken connection up. After an error reply the next one is made a little later: it may well get the same reply."""
        with warnings.catch_warnings():
            # Celery says each time that a later release may end what runs then. This consumer acknowledges nothing late.
            warnings.simplefilter("ignore", CPendingDeprecationWarning)
            super().on_connection_error_after_connected(exc)
        if isinstance(exc, self.channel_errors):
            clock.sleep(_LONGEST_PAUSE_S)

    def ensure_connected(self, conn: Any) -> Any:
        """Return `conn`, connected."""
        if isinstance(conn.transport, redis.Transport):
            conn.transport.Channel = NodeChannel
        said: list[bool] = []

        def complain(error: BaseException, pause_s: float) -> None:
            if not said:
                log.warning("the broker at %s is away: %s", conn.as_uri(), error)
                said.append(True)

        connected = conn.ensure_connection(
            complain,
            None,
            interval_start=_FIRST_PAUSE_S,
            interval_step=_PAUSE_STEP_S,
            interval_max=_LONGEST_PAUSE_S,
            callback=maybe_shutdown,
        )
        self.first_connection_attempt = False
        return connected
