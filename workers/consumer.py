"""The Celery consumer of a node: Celery's own, but it outlives every outage of the broker and is quicker to come back.

Celery waits two seconds longer after each failure, up to half a minute; so long a node would beat and consume nothing,
and would rightly be taken for lost. And what kombu raises on Redis, when a message is put back or acknowledged whose connection
has been given up, is for Celery a reason to end the worker.
"""

from __future__ import annotations

from typing import Any

from celery.utils.log import get_logger
from celery.worker.consumer import Consumer
from celery.worker.state import maybe_shutdown

log = get_logger(__name__)

_FIRST_PAUSE_S, _PAUSE_STEP_S, _LONGEST_PAUSE_S = 0.1, 0.2, 1.0


class NodeConsumer(Consumer):  # type: ignore[misc]
    """Connects to the broker for as long as it takes."""

    def on_connection_error_after_connected(self, exc: BaseException) -> None:
        """Give a broken connection up; what came over it is neither put back nor acknowledged any more.

        This process runs what it was handed, and knows a message that comes again.
        """
        if self.task_consumer is not None:
            channel = self.task_consumer.channel
            channel.do_restore = False
            # Acknowledgements may be under way: threads of the pool leave them to the loop, which goes on with the next connection.
            channel.basic_ack = channel.basic_reject = lambda *args, **kwargs: None
        super().on_connection_error_after_connected(exc)

    def ensure_connected(self, conn: Any) -> Any:
        """Return `conn`, connected."""
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
