"""The channel with which a node takes its messages on Redis. It takes up to `MOST_TAKEN` that wait with one command.

kombu's own channel takes one message for each round trip. With a round trip of 50 ms that is no more than 20 messages a second. The queue
of a node has `no_ack`: nothing has to be kept of what is taken, and beats show what was lost on the way.

A Redis before version 7 has no such command. There it is one message for each round trip, and the log says so.
"""

from __future__ import annotations

import logging
import time
from functools import cached_property
from queue import Empty
from typing import Any, Final

from kombu.transport import redis
from kombu.utils.json import loads

log = logging.getLogger(__name__)

MOST_TAKEN: Final = 64
"""Messages that are taken with one command at most."""


class NodeChannel(redis.Channel):  # type: ignore[misc]
    """kombu's channel on Redis, for the one queue of a node."""

    def basic_reject(self, *args: Any, **kwargs: Any) -> None:
        """Reject nothing. kombu would put the message back into a queue, though that has `no_ack`."""

    @cached_property
    def _takes_many(self) -> bool:
        with self.conn_or_acquire() as client:
            known = client.execute_command("COMMAND INFO", "BLMPOP")[0] is not None
        if not known:
            log.warning("this Redis is older than version 7: messages are taken one by one, which is slow where it is far away")
        return known

    def _brpop_start(self, timeout: float | None = None) -> None:
        if not self._takes_many:
            super()._brpop_start(timeout)
            return
        queues = self._queue_cycle.consume(len(self.active_queues))
        if queues:
            keys = [self._q_for_pri(queue, step) for step in self.priority_steps for queue in queues]
            self._in_poll = self.client.connection
            self._brpop_sent_at = time.monotonic()
            words = [timeout or self.brpop_timeout or 0, len(keys), *keys, "RIGHT", "COUNT", MOST_TAKEN]
            self.client.connection.send_command("BLMPOP", *words)

    def _brpop_read(self, **options: Any) -> bool:
        try:
            try:
                found = self.client.parse_response(self.client.connection, "BLMPOP", **options)
            except self.connection_errors:
                self.client.connection.disconnect()  # the next look connects again
                raise
            if found is None:
                raise Empty
            key, came = found
            for message in came if isinstance(came, list) else [came]:
                self._deliver(message, key.decode().rsplit(self.sep, 1)[0])
            return True
        finally:
            self._in_poll = None
            self._flush_brpop_reauth()

    def _deliver(self, message: bytes, queue: str) -> None:
        try:
            read = loads(message.decode())
            read["properties"]["delivery_tag"]  # what kombu cannot do without
        except (ValueError, LookupError, TypeError) as error:
            log.warning("what is in the queue %s is no message, and is dropped: %r", queue, error)
            return
        self.connection._deliver(read, queue)
