"""The node: what one worker process is to the scheduler.

It claims tries of actions, holds their calls while they run, and reports. One thread sends all reports, so that the
scheduler sees them in the order in which they happened; what has gathered while one message was on its way goes out
together in the next.

| report | when |
|---|---|
| `joined` | the worker consumes its queue; a description of the node with a fresh incarnation |
| `beat` | every `beat_s` seconds; the same description, with what runs and stands now |
| `started` | a try was claimed |
| `finished` | its result is stored and its processes are gone |
| `left` | the worker shuts down |
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from celery import Celery
from kombu import Producer
from kombu.exceptions import OperationalError
from redis import Redis

from app.action_task import Call
from tangram.wire import BLOB_TTL_S, CLAIM_KEY_PREFIX, EVENTS, WireGrant, WireNode

log = logging.getLogger(__name__)

EARLY_ORDERS = 1024
"""Orders to stop or resize that are kept for actions whose own message has not been taken up yet."""

STARTED_HELD_S = 0.02
"""How long a `started` waits for company: the report that a short action has started goes out with that of its end."""

_UNFINISHED_RETRY_S = 0.5


class Node:
    """One node's claims and reports. Safe for many threads."""

    def __init__(
        self,
        app: Celery,
        store: Redis,
        description: WireNode,
        *,
        beat_s: float,
        environments: Callable[[], list[str]] = list,
    ) -> None:
        """Describe the node; nothing is sent before `join`.

        `environments` returns the ids of the environments that stand on it.
        """
        self._app = app
        self._store = store
        self._description: WireNode = {**description, "incarnation": secrets.token_hex(8)}
        self._beat_s = beat_s
        self._environments = environments
        self._calls: dict[str, Call] = {}
        self._lock = threading.Lock()
        self._epoch = 0
        self._stops: OrderedDict[str, str] = OrderedDict()
        self._resizes: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._reports: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._reporter = threading.Thread(target=self._report, name="tangram-reporter", daemon=True)

    @property
    def name(self) -> str:
        """The node's name."""
        return self._description["name"]

    def join(self) -> None:
        """Report the node and begin to beat."""
        self._reports.put({"type": "joined", "node": self._describe()})
        self._reporter.start()

    def leave(self, timeout_s: float = 5.0) -> None:
        """Report that the node goes, and wait until all reports are out."""
        self._reports.put({"type": "left", "name": self.name})
        self._reports.put(None)
        if self._reporter.is_alive():
            self._reporter.join(timeout_s)

    def claim(self, action_id: str, grant: WireGrant, header: dict[str, Any]) -> Call | None:
        """Claim a try of an action.

        Returns None, and the message is dropped, when this try was claimed before or the grant comes from a
        scheduler that has been replaced since.
        """
        with self._lock:
            if grant["epoch"] < self._epoch:
                log.warning("grant of action %s is out of date: epoch %d, now %d", action_id, grant["epoch"], self._epoch)
                return None
            self._epoch = grant["epoch"]
        key = f"{CLAIM_KEY_PREFIX}{action_id}:{grant['attempt']}"
        if not self._store.set(key, self._description["incarnation"], nx=True, ex=BLOB_TTL_S * 24):
            log.warning("try %d of action %s was claimed before; this message is dropped", grant["attempt"], action_id)
            return None
        call = Call(id=action_id, grant=grant, header=header, started_at=time.time(), began=time.perf_counter())
        with self._lock:
            self._calls[action_id] = call
            call.cancel_reason = self._stops.pop(action_id, "")
            cores = self._resizes.pop(action_id, None)
            if cores is not None:
                call.grant = {**grant, "core_ids": list(cores), "units": len(cores)}
        self._reports.put({"type": "started", "id": action_id, "attempt": grant["attempt"], "at": call.started_at})
        return call

    def call(self, action_id: str) -> Call:
        """Return the call of a claimed action. Raises `KeyError` for others."""
        with self._lock:
            return self._calls[action_id]

    def attach(self, call: Call, on_stop: Callable[[str], None], on_resize: Callable[[tuple[int, ...]], None] | None = None) -> None:
        """Say how a running call is stopped and resized; orders that came before are carried out now."""
        with self._lock:
            call.on_stop, call.on_resize = on_stop, on_resize
            stop = call.cancel_reason
            cores = tuple(call.grant["core_ids"])
        if stop:
            on_stop(stop)
        if on_resize is not None and cores:
            on_resize(cores)

    def stop(self, action_id: str, reason: str) -> None:
        """Stop a running call, or the one that is about to be claimed."""
        with self._lock:
            call = self._calls.get(action_id)
            if call is None:
                _keep(self._stops, action_id, reason)
                return
            call.cancel_reason = call.cancel_reason or reason
            on_stop = call.on_stop
        if on_stop is not None:
            on_stop(reason)

    def resize(self, action_id: str, attempt: int, core_ids: tuple[int, ...]) -> None:
        """Give a running call, or the one that is about to be claimed, other cores."""
        with self._lock:
            call = self._calls.get(action_id)
            if call is None:
                _keep(self._resizes, action_id, core_ids)
                return
            if call.grant["attempt"] != attempt:
                return
            call.grant = {**call.grant, "core_ids": list(core_ids), "units": len(core_ids)}
            on_resize = call.on_resize
        if on_resize is not None:
            on_resize(core_ids)

    def finish(self, action_id: str) -> None:
        """Report the end of a claimed call, if it was one."""
        with self._lock:
            call = self._calls.pop(action_id, None)
        if call is None:
            return
        report = {
            "type": "finished",
            "id": action_id,
            "attempt": call.grant["attempt"],
            "status": call.status,
            "reason": call.reason,
            "started_at": call.started_at,
            "execution_s": call.execution_s or 0.0,
            "cpu_s": call.cpu_s,
        }
        self._reports.put(report)

    def _describe(self) -> WireNode:
        with self._lock:
            running = list(self._calls)
        return {**self._description, "running": running, "environments": self._environments()}

    def _report(self) -> None:
        """Send reports until told to end; beat in between."""
        connection = self._app.connection_for_write()
        producer = Producer(connection.channel())
        EVENTS(producer.channel).declare()
        next_beat = time.monotonic() + self._beat_s
        held: list[dict[str, Any]] = []
        held_until = next_beat
        over = False
        while not over:
            reports, over = self._gather(max(0.0, min(next_beat, held_until) - time.monotonic()))
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + self._beat_s
                reports.append({"type": "beat", "node": self._describe()})
            if not held and reports:
                held_until = now + STARTED_HELD_S
            held += reports
            if held and (over or now >= held_until or any(report["type"] != "started" for report in held)):
                self._send(producer, held)
                held, held_until = [], next_beat
        connection.release()

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

    def _send(self, producer: Producer, reports: list[dict[str, Any]]) -> None:
        """Send reports; none is ever dropped, since the scheduler frees a grant on nothing else."""
        policy = {"interval_start": 0.05, "interval_step": 0.2, "interval_max": 2.0, "max_retries": None}
        while True:
            try:
                body = {"events": reports}
                producer.publish(body, exchange="", routing_key=EVENTS.name, serializer="json", retry=True, retry_policy=policy)
                return
            except (OperationalError, OSError) as error:
                log.warning("%d reports cannot be sent yet: %s", len(reports), error)
                time.sleep(_UNFINISHED_RETRY_S)


def _keep(orders: OrderedDict[str, Any], action_id: str, order: object) -> None:
    orders[action_id] = order
    if len(orders) > EARLY_ORDERS:
        orders.popitem(last=False)
