"""The scheduler's end of the broker: kombu for messages, Celery's backend for results without a worker.

A message that is handed on keeps its body and all its headers and properties, byte for byte, so that for Celery it
is the same task: `AsyncResult(id)`, chains and Flower go on working.

Receiving waits for one message and then takes what else is there. On Redis that is by `RPOP` on the queue that just
had one, since the virtual transport's consumer hands out a single message per turn of its loop.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from celery import Celery
from kombu import Consumer, Producer, Queue
from kombu.exceptions import OperationalError
from kombu.message import Message
from kombu.simple import Empty
from kombu.utils.uuid import uuid

from app import redis_intake
from scheduler.service import Received
from tangram.errors import BY_STATUS, ActionFailed, StackUnreachable
from tangram.wire import ACTION_HEADER, CONTROL, EVENTS, GRANT_HEADER, INGRESS, SCHEDULER_KEY, direct_queue, node_queue

log = logging.getLogger(__name__)

MOST_AT_ONCE = 256
"""Messages in one batch: enough that a commit is shared, few enough that the first does not wait for the last."""

_SHOWN_S = 60
_SORTS = {INGRESS.name: "action", EVENTS.name: "events", CONTROL.name: "control"}
_PROPERTIES = ("correlation_id", "reply_to", "content_type", "content_encoding", "priority", "expiration")


class KombuTransport:
    """A connection of its own for receiving and one for sending; not for use by several threads."""

    def __init__(self, app: Celery, *, connect_timeout_s: float) -> None:
        self._app = app
        self._timeout_s = connect_timeout_s
        self._inbox: list[Received] = []
        self._outbox: list[tuple[str, bytes | str, dict[str, Any], dict[str, Any]]] = []
        self._ends: list[tuple[str, str, str]] = []
        self._declared: set[str] = set()
        self._open()

    def _open(self) -> None:
        self._connection = self._app.connection_for_read()
        try:
            self._connection.ensure_connection(max_retries=1, timeout=self._timeout_s)
        except (OperationalError, OSError) as error:
            raise StackUnreachable(f"the broker at {self._connection.as_uri()} cannot be reached: {error}") from None
        self._channel = self._connection.channel()
        self._virtual = not self._connection.transport.implements.asynchronous or "redis" in self._connection.transport.driver_type
        self._queues = {queue.name: queue(self._channel) for queue in (INGRESS, EVENTS, CONTROL)}
        for queue in self._queues.values():
            queue.declare()
        self._consumer = Consumer(self._channel, list(self._queues.values()), on_message=self._on_message, accept=["json"])
        if not self._virtual:
            self._consumer.qos(prefetch_count=2 * MOST_AT_ONCE)
        self._consumer.consume()
        self._sending = self._app.connection_for_write()
        self._producer = Producer(self._sending.channel())

    def close(self) -> None:
        """Close both connections."""
        self._connection.release()
        self._sending.release()

    def receive(self, timeout_s: float) -> list[Received]:
        """Return what has arrived, after waiting at most `timeout_s` for the first message."""
        self._inbox = []
        try:
            self._connection.drain_events(timeout=max(timeout_s, 0.001))
        except (TimeoutError, Empty):
            return []
        if self._virtual:
            self._drain_virtual()
        else:
            self._drain_pushed()
        return self._inbox

    def _drain_virtual(self) -> None:
        queues = [queue for queue in self._queues.values() if any(r.sort == _SORTS[queue.name] for r in self._inbox)]
        for queue in queues:
            for message in redis_intake.take(self._channel, queue.name, MOST_AT_ONCE):
                self._on_message(message)

    def _drain_pushed(self) -> None:
        try:
            while len(self._inbox) < MOST_AT_ONCE:
                self._connection.drain_events(timeout=0.0005)
        except TimeoutError:
            return

    def _on_message(self, message: Message) -> None:
        name = message.delivery_info.get("routing_key")
        sort = _SORTS.get(name)
        try:
            if sort == "action":
                self._inbox.append(self._action(message))
            elif sort is not None:
                self._inbox.append(Received(sort=sort, body=message.decode(), tag=message))  # type: ignore[arg-type]
        except Exception as error:
            # Whatever is wrong with it lies in the message: a stranger may write to the queue, and the loop must go on.
            log.warning("a message on %s cannot be read and is dropped: %s: %s", name, type(error).__name__, error)
            message.ack()

    def _action(self, message: Message) -> Received:
        headers = message.headers or {}
        action_id, task = headers.get("id"), headers.get("task")
        if not isinstance(action_id, str) or not isinstance(task, str):
            raise ValueError("it is no Celery task message of protocol 2")
        properties = {key: message.properties[key] for key in _PROPERTIES if message.properties.get(key) is not None}
        properties["content_type"], properties["content_encoding"] = message.content_type, message.content_encoding
        body = message.body if isinstance(message.body, str) else bytes(message.body).decode("utf-8")
        kept = json.dumps({"body": body, "headers": headers, "properties": properties}, separators=(",", ":"))
        return Received(sort="action", id=action_id, task=task, header=headers.get(ACTION_HEADER), message=kept, tag=message)

    def acknowledge(self, received: Sequence[Received]) -> None:
        """Tell the broker that these need not come again."""
        if self._virtual:
            redis_intake.acknowledge(self._channel, [one.tag for one in received])
            return
        for one in received:
            one.tag.ack()

    def send_action(self, node: str, message: str, grant: Mapping[str, Any]) -> None:
        """Buffer a stored message for a node, with the header `grant`."""
        kept = json.loads(message)
        headers = {**kept["headers"], GRANT_HEADER: dict(grant)}
        self._outbox.append((node, kept["body"], headers, kept["properties"]))

    def send_control(self, node: str, task: str, arguments: Mapping[str, Any]) -> None:
        """Buffer a control task for a node; nobody reads its result."""
        message = self._app.amqp.as_task_v2(uuid(), task, (), dict(arguments), ignore_result=True)
        body = json.dumps(message.body)
        properties = {"content_type": "application/json", "content_encoding": "utf-8", **message.properties}
        self._outbox.append((node, body, message.headers, properties))

    def store_end(self, action_id: str, message: str, status: str, reason: str) -> None:
        """Buffer the result of an action that ends without a worker."""
        self._ends.append((action_id, status, reason))

    def flush(self) -> None:
        """Send and store what was buffered."""
        outbox, self._outbox = self._outbox, []
        if outbox:
            with self._producer.batch(max_size=MOST_AT_ONCE):
                for node, body, headers, properties in outbox:
                    queue = self._node_queue(node)
                    self._producer.publish(body, exchange="", routing_key=queue.name, headers=headers, **properties)
        ends, self._ends = self._ends, []
        for action_id, status, reason in ends:
            self._store(action_id, status, reason)

    def show(self, figures: Mapping[str, Any]) -> None:
        """Keep the scheduler's figures where tools look for them."""
        self._app.backend.client.set(SCHEDULER_KEY, json.dumps(dict(figures)), ex=_SHOWN_S)

    def _node_queue(self, node: str) -> Queue:
        queue = direct_queue(node_queue(node))
        if queue.name not in self._declared:
            queue(self._producer.channel).declare()
            self._declared.add(queue.name)
        return queue

    def _store(self, action_id: str, status: str, reason: str) -> None:
        backend = self._app.backend
        if status == "succeeded":
            act = {"queue_s": 0.0, "overhead_s": 0.0, "execution_s": 0.0}
            payload = {"status": status, "value": None, "reason": reason, "dop": 0, "act": act}
            backend.store_result(action_id, payload, "SUCCESS")
            return
        backend.store_result(action_id, BY_STATUS.get(status, ActionFailed)(reason), "FAILURE")
