"""A broker in memory as clients and nodes see it, and the transports of schedulers over it."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Mapping
from typing import Any

from celery import Celery

from app.broker.memory import use
from app.broker.memory_store import MemoryBroker
from app.broker.stored_ends import stored_end
from app.broker.transport import KombuTransport
from scheduler.live.transport import Received
from tangram.wire import ACTION_HEADER, CONTROL_QUEUE, EVENTS_QUEUE, GRANT_HEADER, INGRESS_QUEUE, RESULT_KEY_PREFIX, node_queue


class Transport(KombuTransport):
    """A transport that waits for nothing: what is to come has been sent before."""

    def receive(self, timeout_s: float) -> list[Received]:
        return super().receive(0.0)


class Broker(MemoryBroker):
    """A broker, and a result store."""

    def __init__(self) -> None:
        super().__init__()
        self.app = use(Celery(set_as_current=False), self)

    def transport(self, epoch: int) -> Transport:
        """Return that of the scheduler of an epoch."""
        return Transport(self.app, connect_timeout_s=1.0, epoch=epoch)

    def submit(self, action_id: str, header: Mapping[str, Any]) -> None:
        """Send an action."""
        self.send(INGRESS_QUEUE, [[], {}, {}], {"id": action_id, "task": header["kind"], ACTION_HEADER: header})

    def report(self, *reports: object) -> None:
        """Send reports of a node in one message."""
        self.send(EVENTS_QUEUE, {"events": list(reports)})

    def request(self, body: object) -> None:
        """Send a control request."""
        self.send(CONTROL_QUEUE, body)

    def send(self, queue: str, body: object, headers: dict[str, Any] | None = None) -> None:
        """Send anything."""
        with self.app.connection_for_write() as connection:
            connection.Producer(serializer="json").publish(body, exchange="", routing_key=queue, headers=headers)

    def is_done(self) -> bool:
        """Say whether everything that was sent to the scheduler is acknowledged."""
        self.put_back(but="")
        return not any(map(self.waiting, (INGRESS_QUEUE, EVENTS_QUEUE, CONTROL_QUEUE)))

    def grants(self, node: str = "n") -> list[tuple[str, int]]:
        """Return the actions that wait for a node, and the numbers of their tries."""
        headers = [json.loads(message)["headers"] for message in self.waiting(node_queue(node))]
        return [(one["id"], one[GRANT_HEADER]["attempt"]) for one in headers if GRANT_HEADER in one]

    def orders(self, node: str = "n") -> list[tuple[str, str]]:
        """Take the orders that a node has got, control tasks and the ids that they name; its actions go with them."""
        messages = list(map(json.loads, iter(lambda: self.pop(node_queue(node)), None)))
        found = [(one["headers"]["task"], json.loads(b64decode(one["body"]))[1]) for one in messages]
        return [(task, str(arguments.get("id"))) for task, arguments in found if task.startswith("tangram.")]

    def end(self, action_id: str) -> tuple[str, str] | None:
        """Return how an action has ended as its client is told, and the cause."""
        end = stored_end(action_id, "my.task", self.value(RESULT_KEY_PREFIX + action_id))
        return None if end is None else (end.status, end.cause)
