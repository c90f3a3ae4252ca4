"""Broker and result store in the memory of one process: the stub that stands for Redis.

A client, a scheduler and nodes of one process use it through kombu, Celery and redis-py's words, as they use Redis. It keeps the promises
that `tests/broker` checks for memory, Redis and RabbitMQ alike. It has no streams of output, no priorities and no chords.

| part | stands for |
|---|---|
| `MemoryBroker` (`app/broker/memory_store.py`) | the server: queues and keys |
| `MemoryStore`, `MemoryPubSub` | redis-py's client, as far as clients, schedulers and nodes use it |
| `Transport` | kombu's transport for the scheme `tangram-memory`; the broker is its option `broker` |
| `MemoryBackend` | `RedisResults`: stores a result, unless another end stands, and publishes it under its key |
| `MemoryIntake` | `RedisIntake`: messages are taken by an epoch, and come again unless they are acknowledged |

Waiting goes by `tangram.clock`, so everything may run on a virtual clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from queue import Empty
from typing import Any

from celery import Celery
from kombu.transport import TRANSPORT_ALIASES, virtual
from kombu.utils.json import dumps, loads

from app.broker import redis_intake
from app.broker.memory_store import BrokenConnection, MemoryBroker, MemoryStore
from app.broker.results import FirstEndStays, may_stand
from tangram import clock
from tangram.wire import ENDED_CLAIM_TTL_S

SCHEME = "tangram-memory"
TRANSPORT_ALIASES[SCHEME] = f"{__name__}:Transport"

Taken = tuple[str, bytes]
"""The name of a queue, and a message in it."""


class MemoryBackend(FirstEndStays):
    """Celery's result backend in a `MemoryBroker`. An app uses it after `use`."""

    supports_native_join = False
    persistent = True
    has_broker = True

    def __init__(self, app: Celery, broker: MemoryBroker) -> None:
        super().__init__(app)
        self.client = MemoryStore(broker)

    def get(self, key: str) -> bytes | None:
        """Return what is stored under a key."""
        return self.client.get(_text(key))

    def mget(self, keys: Iterable[str]) -> list[bytes | None]:
        """Return what is stored under keys."""
        return self.client.mget(map(_text, keys))

    def _offer(self, key: str, result: bytes, claim: str, final: bool, queue: str, message: bytes) -> bool:
        broker = self.client.broker
        broker.called("set", key)
        with broker.lock:
            stands = may_stand(broker.value(key), result, broker.value(claim))
            if stands and message and broker.value(key) != result:
                broker.put(queue, message)
            if stands:
                broker.keep(key, result, self.expires)
                broker.publish(key, result)
                if final and (claimed := broker.value(claim)) is not None:
                    broker.keep(claim, claimed, ENDED_CLAIM_TTL_S)
        broker.called("set done", key)
        return stands

    def delete(self, key: str) -> None:
        """Remove a key."""
        self.client.delete(_text(key))


class Channel(virtual.Channel):  # type: ignore[misc]
    """Kombu's channel to a `MemoryBroker`."""

    do_restore = False

    @property
    def broker(self) -> MemoryBroker:
        """The broker."""
        broker: MemoryBroker = self.connection.client.transport_options["broker"]
        return broker

    def _put(self, queue: str, message: dict[str, Any], **_: Any) -> None:
        _put(self.broker, queue, dumps(message).encode())

    def _get(self, queue: str, timeout: float | None = None) -> dict[str, Any]:
        self.broker.called("pop", queue)
        message = self.broker.pop(queue)
        if message is None:
            raise Empty
        found: dict[str, Any] = loads(message.decode())
        return found

    def _size(self, queue: str) -> int:
        return len(self.broker.waiting(queue))

    def _purge(self, queue: str) -> int:
        return self.broker.purge(queue)


class Transport(virtual.Transport):  # type: ignore[misc]
    """Kombu's transport to a `MemoryBroker`, for sending and for getting single messages."""

    Channel = Channel
    driver_type = "memory"
    driver_name = "tangram"
    connection_errors = (*virtual.Transport.connection_errors, OSError)

    def driver_version(self) -> str:
        """Return the version of the driver: it has none."""
        return "N/A"

    def establish_connection(self) -> Any:
        """Connect. Raises what `MemoryBroker.called` raises."""
        self.client.transport_options["broker"].called("connect", "")
        return super().establish_connection()


class MemoryIntake:
    """Takes messages of `queues` for the scheduler of an epoch. For one thread."""

    def __init__(self, broker: MemoryBroker, queues: Sequence[str], epoch: int, number: int = 0) -> None:
        """Connect, and take over what other intakes had taken and not acknowledged."""
        self._broker = broker
        self._queues = tuple(queues)
        self._holder = f"{epoch}.{number}"
        self._connection = broker.connections
        self._arrived = clock.event()
        self._next_rescue = clock.monotonic()
        self._check("take")
        for queue in self._queues:
            broker.listen(queue, self._arrived)

    def take(self, timeout_s: float, most: int) -> list[Taken]:
        """Return what waits, at most `most` of each queue, after waiting up to `timeout_s` for the first message."""
        self._check("take")
        if clock.monotonic() >= self._next_rescue:
            self._next_rescue = clock.monotonic() + redis_intake.RESCUE_S
            self._broker.put_back(self._holder, self._queues)
        self._arrived.clear()  # before the queues are read: what arrives after that ends the wait
        if not any(map(self._broker.waiting, self._queues)):
            self._arrived.wait(timeout_s)
            self._check("take")
        return [(queue, message) for queue in self._queues for message in self._broker.take(self._holder, queue, most)]

    def settle(self, messages: Mapping[str, Sequence[bytes]], taken: Sequence[Taken]) -> None:
        """Put messages into queues, those of a queue in order, then forget those taken for good."""
        for queue, of_queue in messages.items():
            for message in of_queue:
                _put(self._broker, queue, message)
        if taken:
            self._check("acknowledge")
        for queue, message in taken:
            self._broker.acknowledge(self._holder, queue, message)

    def close(self) -> None:
        """Listen no more. What was not acknowledged goes back with the next intake."""
        self._broker.hear_no_more(self._arrived)

    def _check(self, operation: str) -> None:
        self._broker.called(operation, "")
        if self._connection != self._broker.connections:
            raise BrokenConnection("the connection is broken")


def _put(broker: MemoryBroker, queue: str, message: bytes) -> None:
    broker.called("put", queue)
    broker.put(queue, message)
    broker.called("put done", queue)


def use(app: Celery, broker: MemoryBroker) -> Celery:
    """Have a Celery app use `broker` for messages and results; return it."""
    app.conf.broker_url = f"{SCHEME}://"
    app.conf.broker_transport_options = {"broker": broker}
    app._backend = MemoryBackend(app, broker)  # Celery has no public way for a backend that exists already
    return app


def _text(key: str | bytes) -> str:
    return key.decode() if isinstance(key, bytes) else key
