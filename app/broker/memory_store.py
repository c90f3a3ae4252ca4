"""Queues and keys in the memory of one process, in redis-py's words: the server and the client that `app/broker/memory.py` builds on.

`MemoryBroker.called` is told each operation before it is carried out, and the end of each that changes something, as `… done`. It may raise
in either case, as a network would.
"""

from __future__ import annotations

import fnmatch
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from queue import Empty
from typing import Any, Self

from redis import RedisError, ResponseError

from tangram import clock


class MemoryBroker:
    """The server. Safe for use by many threads."""

    def __init__(self, called: Callable[[str, str], None] = lambda operation, name: None) -> None:
        """Begin empty. `called(operation, name)` is told each operation on a queue or key, and may raise."""
        self.called = called
        self.lock = threading.RLock()
        """Held by whoever does several things at once."""
        self._queues: dict[str, deque[bytes]] = {}
        self._taken: dict[str, dict[str, deque[bytes]]] = {}
        self._arrived: dict[str, list[threading.Event]] = {}
        self._values: dict[str, tuple[bytes, float | None]] = {}
        self._subscribers: list[MemoryPubSub] = []
        self._connections = 0

    # Queues

    def put(self, queue: str, message: bytes, *, first: bool = False) -> None:
        """Add a message to a queue, behind all others or as the `first`."""
        with self.lock:
            waiting = self._queues.setdefault(queue, deque())
            (waiting.appendleft if first else waiting.append)(message)
            for event in self._arrived.get(queue, ()):
                event.set()

    def pop(self, queue: str) -> bytes | None:
        """Remove and return the oldest message of a queue."""
        with self.lock:
            waiting = self._queues.get(queue)
            return waiting.popleft() if waiting else None

    def waiting(self, queue: str) -> tuple[bytes, ...]:
        """Return the messages of a queue, the oldest first."""
        with self.lock:
            return tuple(self._queues.get(queue, ()))

    def purge(self, queue: str) -> int:
        """Remove all messages of a queue; return how many."""
        with self.lock:
            return len(self._queues.pop(queue, ()))

    def listen(self, queue: str, event: threading.Event) -> None:
        """Have `event` set whenever a message arrives in a queue."""
        with self.lock:
            self._arrived.setdefault(queue, []).append(event)

    def hear_no_more(self, event: threading.Event) -> None:
        """Set `event` no more."""
        with self.lock:
            for events in self._arrived.values():
                if event in events:
                    events.remove(event)

    def take(self, holder: str, queue: str, most: int) -> list[bytes]:
        """Move the oldest messages of a queue to `holder`; return them."""
        with self.lock:
            waiting = self._queues.get(queue, deque())
            found = [waiting.popleft() for _ in range(min(most, len(waiting)))]
            self._taken.setdefault(holder, {}).setdefault(queue, deque()).extend(found)
            return found

    def acknowledge(self, holder: str, queue: str, message: bytes) -> None:
        """Forget a message that `holder` has taken."""
        with self.lock:
            held = self._taken.get(holder, {}).get(queue)
            if held is not None and message in held:
                held.remove(message)

    def put_back(self, but: str, queues: Sequence[str]) -> int:
        """Put all messages back into these queues that others than `but` have taken from them; return how many."""
        count = 0
        with self.lock:
            for taken in [taken for holder, taken in self._taken.items() if holder != but]:
                for queue in queues:
                    messages = taken.pop(queue, deque())
                    count += len(messages)
                    for message in reversed(messages):
                        self.put(queue, message, first=True)
        return count

    def restart(self, *, keeps: bool) -> None:
        """Break all connections; unless it `keeps` its data, forget everything."""
        with self.lock:
            self._connections += 1
            self.wake()
            self._subscribers.clear()
            for event in itertools.chain.from_iterable(self._arrived.values()):
                event.set()
            if not keeps:
                self._queues.clear()
                self._taken.clear()
                self._values.clear()

    @property
    def connections(self) -> int:
        """A number that changes when all connections break."""
        return self._connections

    # Keys

    def value(self, key: str) -> bytes | None:
        """Return the value of a key, unless it has expired."""
        with self.lock:
            found = self._values.get(key)
            if found is None:
                return None
            if found[1] is not None and found[1] <= clock.monotonic():
                del self._values[key]
                return None
            return found[0]

    def left_s(self, key: str) -> float | None:
        """Return the seconds until a key expires; None for a key without an end, or none."""
        with self.lock:
            until = self._values[key][1] if self.value(key) is not None else None
            return None if until is None else until - clock.monotonic()

    def keep(self, key: str, value: bytes | None, lasts_s: float | None) -> None:
        """Set a key for some seconds, or for good; with None as its value, remove it."""
        with self.lock:
            if value is None:
                self._values.pop(key, None)
            else:
                self._values[key] = (value, None if lasts_s is None else clock.monotonic() + lasts_s)

    def keys(self, prefix: str = "") -> list[str]:
        """Return the keys that begin with `prefix`."""
        with self.lock:
            return [key for key in list(self._values) if key.startswith(prefix) and self.value(key) is not None]

    def wake(self) -> None:
        """Have every subscriber read nothing once before what is published next, as redis-py does for the answer to its own ping."""
        with self.lock:
            for subscriber in self._subscribers:
                subscriber.wake()

    def subscribe(self, subscriber: MemoryPubSub) -> None:
        """Have what is published brought to a subscriber."""
        with self.lock:
            self._subscribers.append(subscriber)

    def unsubscribe(self, subscriber: MemoryPubSub) -> None:
        """Bring nothing to a subscriber any more."""
        with self.lock:
            if subscriber in self._subscribers:
                self._subscribers.remove(subscriber)

    def publish(self, channel: str, data: bytes) -> int:
        """Bring `data` to all subscribers of a channel; return how many."""
        with self.lock:
            return sum(subscriber.bring(channel, data) for subscriber in self._subscribers)


class MemoryStore:
    """Redis-py's client of a `MemoryBroker`."""

    def __init__(self, broker: MemoryBroker) -> None:
        """Use `broker`."""
        self.broker = broker
        self.connection_pool = self

    def disconnect(self) -> None:
        """Give connections back: there are none."""

    def ping(self) -> bool:
        """Answer."""
        self.broker.called("ping", "")
        return True

    def get(self, key: str) -> bytes | None:
        """Return the value of a key."""
        self.broker.called("get", key)
        return self.broker.value(key)

    def mget(self, keys: Iterable[str]) -> list[bytes | None]:
        """Return the values of keys."""
        keys = list(keys)
        self.broker.called("mget", keys[0] if keys else "")
        return [self.broker.value(key) for key in keys]

    def set(
        self,
        key: str,
        value: object,
        ex: float | None = None,
        px: float | None = None,
        nx: bool = False,
        xx: bool = False,
        keepttl: bool = False,
    ) -> bool | None:
        """Set a key, as SET does; None where `nx` or `xx` forbids it."""
        self.broker.called("set", key)
        there = self.broker.value(key) is not None
        if (nx and there) or (xx and not there):
            return None
        lasts_s = ex if ex is not None else px / 1000 if px is not None else self.broker.left_s(key) if keepttl else None
        self.broker.keep(key, value if isinstance(value, bytes) else str(value).encode(), lasts_s)
        self.broker.called("set done", key)
        return True

    def strlen(self, key: str) -> int:
        """Return how long the value of a key is."""
        self.broker.called("strlen", key)
        return len(self.broker.value(key) or b"")

    def setrange(self, key: str, begin: int, value: bytes) -> int:
        """Write a part of the value of a key, after zeros where it is too short; return its length."""
        self.broker.called("setrange", key)
        before = (self.broker.value(key) or b"").ljust(begin, b"\0")
        whole = before[:begin] + value + before[begin + len(value) :]
        self.broker.keep(key, whole, self.broker.left_s(key))
        return len(whole)

    def rename(self, source: str, target: str) -> bool:
        """Give a value another key, with its time. Raises `ResponseError` where there is none."""
        self.broker.called("rename", source)
        value, left_s = self.broker.value(source), self.broker.left_s(source)
        if value is None:
            raise ResponseError("no such key")
        self.broker.keep(source, None, None)
        self.broker.keep(target, value, left_s)
        return True

    def exists(self, *keys: str) -> int:
        """Return how many of some keys there are."""
        self.broker.called("exists", keys[0] if keys else "")
        return sum(self.broker.value(key) is not None for key in keys)

    def delete(self, *keys: str) -> int:
        """Remove keys; return how many there were."""
        self.broker.called("delete", keys[0] if keys else "")
        there = [key for key in keys if self.broker.value(key) is not None]
        for key in there:
            self.broker.keep(key, None, None)
        return len(there)

    unlink = delete

    def expire(self, key: str, seconds: float) -> bool:
        """Have a key expire; return whether it is there."""
        self.broker.called("expire", key)
        value = self.broker.value(key)
        if value is not None:
            self.broker.keep(key, value if seconds > 0 else None, seconds)
        return value is not None

    def pexpire(self, key: str, milliseconds: int) -> bool:
        """Have a key expire; return whether it was there."""
        return self.expire(key, milliseconds / 1000)

    def pttl(self, key: str) -> int:
        """Return the milliseconds until a key expires; -1 for never, -2 for no key."""
        self.broker.called("pttl", key)
        left_s = self.broker.left_s(key)
        if left_s is None:
            return -2 if self.broker.value(key) is None else -1
        return round(left_s * 1000)

    def publish(self, channel: str, data: bytes) -> int:
        """Publish data."""
        self.broker.called("publish", channel)
        return self.broker.publish(channel, data)

    def pubsub(self) -> MemoryPubSub:
        """Return a subscriber without subscriptions."""
        return MemoryPubSub(self.broker)

    def pipeline(self, transaction: bool = True) -> _Pipeline:
        """Return what carries several commands out at once."""
        return _Pipeline(self)

    def transaction(self, change: Callable[[_Pipeline], object], *watched: str) -> list[object]:
        """Carry out what `change` puts into a pipeline after what it reads; nobody else changes anything between the two."""
        with self.broker.lock, self.pipeline() as pipeline:
            change(pipeline)
            return pipeline.execute()


class _Pipeline:
    """Keeps commands until `execute`."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._commands: list[Callable[[], object]] = []

    def __enter__(self) -> _Pipeline:
        return self

    def __exit__(self, *error: object) -> None:
        self._commands.clear()

    def multi(self) -> None:
        """End what a transaction reads: commands are kept from the beginning."""

    def __getattr__(self, name: str) -> Callable[..., _Pipeline]:
        command = getattr(self._store, name)

        def add(*args: Any, **kwargs: Any) -> _Pipeline:
            self._commands.append(lambda: command(*args, **kwargs))
            return self

        return add

    def execute(self) -> list[object]:
        """Carry the commands out, in order."""
        commands, self._commands = self._commands, []
        return [command() for command in commands]


class MemoryPubSub:
    """Redis-py's subscriber, for patterns. What is published while it does not listen is missed."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker
        self._connection = broker.connections
        self._patterns: list[str] = []
        self._messages = clock.fifo()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._patterns.clear()
        self._broker.unsubscribe(self)

    def psubscribe(self, pattern: str) -> None:
        """Subscribe to all channels of a pattern."""
        self._broker.called("subscribe", pattern)
        self._connection = self._broker.connections
        self._patterns.append(pattern)
        self._broker.subscribe(self)
        self._messages.put({"type": "psubscribe", "channel": pattern.encode(), "data": len(self._patterns)})

    def bring(self, channel: str, data: bytes) -> bool:
        """Take a message in, if its channel is subscribed; return whether it is."""
        heard = any(fnmatch.fnmatchcase(channel, pattern) for pattern in self._patterns)
        if heard:
            self._messages.put({"type": "pmessage", "channel": channel.encode(), "data": data})
        return heard

    def wake(self) -> None:
        """Have `get_message` look after its connection now, and return nothing."""
        self._messages.put(None)

    def ping(self) -> None:
        """Have the server answer, after all that it has published."""
        self._check()
        self._messages.put({"type": "pong", "channel": None, "data": b""})

    def get_message(self, timeout: float = 0.0) -> dict[str, Any] | None:
        """Return the next message, after waiting at most `timeout` seconds for it."""
        self._check()
        message: dict[str, Any] | None = None
        with suppress(Empty):
            message = self._messages.get(timeout=timeout) if timeout > 0 else self._messages.get_nowait()
        if message is None:
            self._check()
        return message

    def _check(self) -> None:
        self._broker.called("listen", "")
        if self._connection != self._broker.connections:
            raise BrokenConnection("the connection is broken")


class BrokenConnection(RedisError, ConnectionError):
    """Raised when the broker has broken all connections."""
