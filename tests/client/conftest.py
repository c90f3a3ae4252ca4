"""A peer for the client: the far end of the real protocol, without scheduler or sandboxes.

It consumes the queue `actions` with kombu and stores results with Celery's own Redis backend, which publishes them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from celery import Celery
from kombu import Message
from kombu.mixins import ConsumerMixin

from tangram import Settings
from tangram.wire import CONTROL, INGRESS

HOLD = object()
"""What a behaviour returns to leave an action without a result."""


def payload(value: Any = None, **more: Any) -> dict[str, Any]:
    """Return what a task of this system stores."""
    act = {"queue_s": 0.0, "overhead_s": 0.0, "execution_s": 0.0}
    return {"status": "succeeded", "value": value, "reason": "", "dop": 1, "act": act} | more


def printed(text: str) -> dict[str, Any]:
    """Return the payload of a command that printed `text`."""
    return payload({"exit_code": 0, "stdout": text, "stderr": "", "truncated": False, "cpu_s": 0.1, "max_rss_mb": 2.0})


@dataclass(frozen=True)
class Seen:
    """One action as it arrived."""

    id: str
    kind: str
    header: Mapping[str, Any]
    arguments: dict[str, Any]
    celery: Mapping[str, Any]


def usual(seen: Seen) -> Any:
    """Answer as a working stack would: commands print themselves."""
    return printed(seen.arguments["command"]) if seen.kind == "cpu.exec" else payload()


class Peer(ConsumerMixin):  # type: ignore[misc]
    """Takes in actions and control messages and answers as `behave` says: a value, an exception, or `HOLD`."""

    HOLD = HOLD
    payload = staticmethod(payload)
    printed = staticmethod(printed)
    usual = staticmethod(usual)

    def __init__(self, broker: str, result: str) -> None:
        self.app = Celery("peer", broker=broker, backend=result, set_as_current=False)
        self.app.conf.update(task_serializer="json", result_serializer="json", accept_content=["json"])
        self.connection = self.app.connection_for_read()
        self.behave: Callable[[Seen], Any] = usual
        self.seen: list[Seen] = []
        self.controls: list[dict[str, Any]] = []
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self.run, daemon=True)

    def get_consumers(self, consumer: Any, channel: Any) -> list[Any]:
        """Consume what a scheduler consumes."""
        return [
            consumer([INGRESS], callbacks=[self._action], accept=["json"], prefetch_count=1000),
            consumer([CONTROL], callbacks=[self._control], accept=["json"]),
        ]

    def store(self, task_id: str, result: Any) -> None:
        """Store the end of a task as a Celery worker would."""
        if isinstance(result, BaseException):
            self.app.backend.mark_as_failure(task_id, result)
        else:
            self.app.backend.store_result(task_id, result, "SUCCESS")

    def until(self, condition: Callable[[], object], timeout_s: float = 60.0) -> None:
        """Wait until something arrived that makes `condition` true."""
        with self._news:
            assert self._news.wait_for(condition, timeout_s), f"saw only {[(s.kind, s.id) for s in self.seen][-5:]} {self.controls}"

    def kinds(self) -> list[str]:
        """Return the kinds of all actions that arrived, in order."""
        return [seen.kind for seen in self.seen]

    @contextlib.contextmanager
    def running(self) -> Iterator[Peer]:
        """Run beside a test."""
        self._thread.start()
        try:
            yield self
        finally:
            self.should_stop = True
            with self.app.connection_for_write() as connection:
                # Its thread sleeps in a read for up to a second; a message wakes it.
                connection.Producer().publish({}, routing_key=CONTROL.name, exchange="", serializer="json")
            self._thread.join(60)
            self.app.backend.client.close()
            self.app.close()

    def _action(self, body: Any, message: Message) -> None:
        message.ack()
        seen = Seen(message.headers["id"], message.headers["task"], message.headers["tangram"], body[1], message.headers)
        with self._news:
            self.seen.append(seen)
        result = self.behave(seen)
        if result is not HOLD:
            self.store(seen.id, result)
        with self._news:
            self._news.notify_all()

    def _control(self, body: dict[str, Any], message: Message) -> None:
        message.ack()
        with self._news:
            self.controls.append(body)
            self._news.notify_all()


@pytest.fixture
def peer(redis_urls: Any) -> Iterator[Peer]:
    """Return a running peer on Redis."""
    with Peer(redis_urls.broker, redis_urls.result).running() as running:
        yield running


@pytest.fixture
def settings(redis_urls: Any) -> Settings:
    """Return the settings of a client on that Redis."""
    return Settings(broker_url=redis_urls.broker, result_url=redis_urls.result, connect_timeout_s=60)
