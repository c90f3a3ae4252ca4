"""The thread that carries a node's reports to the scheduler, in the order in which they happened, and its beats.

What has gathered while one message was on its way goes out together in the next. No report is ever dropped, since the
scheduler frees a grant on nothing else: while the broker is away they wait here. Only beats, which say how things are now,
are not sent late. Figures of usage are: each is sent once, and counts from the start.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from celery import Celery
from kombu import Connection, Producer, Queue

from app.broker.amqp_intake import HEARTBEAT_S, sender_heartbeats
from tangram import clock
from tangram.wire import WireNode

log = logging.getLogger(__name__)

HELD, HELD_S = "sent", 0.02
"""A report that waits so long for company."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0


class Reporter:
    """Sends reports. `put` may be called by any thread."""

    def __init__(
        self,
        app: Celery,
        events: Queue,
        describe: Callable[[], WireNode],
        beat_s: float,
        used: Callable[[], list[dict[str, Any]]],
        usage_s: float,
        begun: Callable[[], list[dict[str, Any]]] = list,
    ) -> None:
        """Prepare; `start` begins.

        Reports go to the queue `events`. `describe` returns what a beat says, `begun` the reports that go out before it, and `used` those
        that go out every `usage_s`.
        """
        self._app = app
        self._events = events
        self._describe = describe
        self._beat_s = beat_s
        self._used = used
        self._begun = begun
        self._usage_s = usage_s
        self._reports: queue.SimpleQueue[dict[str, Any] | None] = clock.fifo()
        self._connection: Connection | None = None
        self._producer: Producer | None = None
        self._check: Callable[[], None] = lambda: None
        self._giving_up = clock.event()
        self.has_joined = clock.event()
        """Set once the first report has gone out, or is given up."""
        self._thread = clock.thread(self._run, "tangram-reporter")

    def start(self) -> None:
        """Begin to send and to beat."""
        self._thread.start()

    def put(self, report: dict[str, Any]) -> None:
        """Have a report sent soon; never blocks."""
        self._reports.put(report)

    def stop(self, timeout_s: float) -> None:
        """Send what is left, waiting at most `timeout_s` for that."""
        self._reports.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        self._giving_up.set()
        self.has_joined.set()

    def _run(self) -> None:
        next_beat, next_usage = clock.monotonic() + self._beat_s, clock.monotonic() + self._usage_s
        held: list[dict[str, Any]] = []
        held_until = next_beat
        over = False
        while not over:
            reports, over = self._gather(max(0.0, min(next_beat, next_usage, held_until) - clock.monotonic()))
            now = clock.monotonic()
            if now >= next_beat:
                next_beat = now + self._beat_s
                reports += [*self._begun(), {"type": "beat", "node": self._describe()}]
            if now >= next_usage:
                next_usage = now + self._usage_s
                reports += self._used()
            if not held and reports:
                held_until = now + HELD_S
            held += reports
            if held and (over or now >= held_until or any(report["type"] != HELD for report in held)):
                self._send(held)
                held, held_until = [], next_beat
        self._disconnect()

    def _gather(self, timeout_s: float) -> tuple[list[dict[str, Any]], bool]:
        reports: list[dict[str, Any]] = []
        try:
            report = self._reports.get(timeout=timeout_s)
            while report is not None:
                reports.append(report)
                report = self._reports.get_nowait()
            return reports, True
        except queue.Empty:
            return reports, False

    def _send(self, reports: list[dict[str, Any]]) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._giving_up.is_set():
            try:
                producer = self._producer or self._connect()
                self._check()
                producer.publish({"events": reports}, exchange="", routing_key=self._events.name, serializer="json")
                self.has_joined.set()
                return
            except Exception as error:
                # Every transport has errors of its own, and this thread must outlive them all.
                if pause_s == _FIRST_PAUSE_S:
                    log.warning("reports cannot be sent yet: %s", error)
                self._disconnect()
                self._giving_up.wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                # A beat of before says nothing of now, and the next one follows at once.
                reports = [report for report in reports if report["type"] != "beat"] or [{"type": "beat", "node": self._describe()}]

    def _connect(self) -> Producer:
        connection = self._connection = self._app.connection_for_write(heartbeat=HEARTBEAT_S)
        connection.ensure_connection(max_retries=1, interval_start=0)
        channel = connection.channel()
        self._events(channel).declare()
        self._check = sender_heartbeats(connection)
        self._producer = Producer(channel)
        return self._producer

    def _disconnect(self) -> None:
        connection, self._connection, self._producer = self._connection, None, None
        if connection is not None:
            with suppress(Exception):  # it is given up anyway, mostly because it broke
                connection.release()
