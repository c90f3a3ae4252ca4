"""Large parts of payloads, kept in the result store beside the messages.

A value up to `wire.BLOB_THRESHOLD_BYTES` travels as it is (bytes as base64 text); a larger one is put under a key of its own
that expires, and a reference `{"$blob": key, "bytes": n}` travels instead. Trainers and workers use the same class.
Only putting and getting lives here; which arguments and results may be large is written in `tangram.wire`.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeVar
from uuid import uuid4

from redis import Redis, RedisError

from tangram import clock
from tangram.errors import ActionFailed
from tangram.wire import BLOB_KEY_PREFIX, BLOB_THRESHOLD_BYTES, BLOB_TTL_S, SHARED_BLOB_KEY_PREFIX

_log = logging.getLogger(__name__)

_REFERENCE = "$blob"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0

PART_BYTES: Final = 1 << 20
"""The most that is sent in one command. A line of 2 Mbit/s carries it within the store's timeout of 5 s."""

GROWING_MS: Final = 120_000
"""How long the parts of a value that is not whole are kept after the last of them. A writer that comes later begins anew."""

T = TypeVar("T")


def keys_of(arguments: Iterable[object]) -> list[str]:
    """Return the keys of the blobs that arguments refer to."""
    found = (value.get(_REFERENCE) for value in arguments if isinstance(value, Mapping))
    return [key for key in found if isinstance(key, str) and key.startswith(BLOB_KEY_PREFIX)]


def own(keys: Iterable[object]) -> list[str]:
    """Return those keys of blobs that belong to one action, so that nobody asks for them once that has ended."""
    texts = (key for key in keys if isinstance(key, str))
    return [key for key in texts if key.startswith(BLOB_KEY_PREFIX) and not key.startswith(SHARED_BLOB_KEY_PREFIX)]


class Blobs:
    """Puts large values into Redis and gets them back; safe for use by many threads.

    Both raise what redis-py raises when the store is away, or answers with errors, for longer than `patience_s`.
    Getting raises `ActionFailed` for a blob that has expired and for values that are neither inline nor a reference.
    """

    def __init__(
        self,
        store: Redis,
        threshold_bytes: int = BLOB_THRESHOLD_BYTES,
        ttl_s: float = BLOB_TTL_S,
        *,
        patience_s: float = 0.0,
        prefix: str = BLOB_KEY_PREFIX,
        between_parts: Callable[[], object] = lambda: None,
    ) -> None:
        """Use `store`; values above `threshold_bytes` become blobs that live for `ttl_s`.

        With `SHARED_BLOB_KEY_PREFIX` as their `prefix`, several actions may refer to one. `between_parts` is called after each part of a
        large value, in the thread that puts the value.
        """
        self._prefix = prefix
        self.store = store
        self._patience_s = patience_s
        self._between_parts = between_parts
        self._closing = clock.event()
        self._waiting = set[object]()
        self._threshold_bytes = threshold_bytes
        self._ttl_ms = max(1, round(ttl_s * 1000))

    def close(self) -> None:
        """Wait no longer for a store that is away."""
        self._closing.set()

    def put(self, data: bytes, before: object = None) -> str | dict[str, Any]:
        """Return the wire form of `data`: base64 text, or a reference. With the reference `before`, it goes to the same key."""
        return self._keep(data, before) if self._large(data) else base64.b64encode(data).decode("ascii")

    def get(self, value: object) -> bytes:
        """Return the bytes that `put` was given."""
        if isinstance(value, Mapping):
            return self._fetch(value)
        if not isinstance(value, str):
            raise ActionFailed(f"expected base64 text or a blob reference, not {type(value).__name__}", "result_lost")
        try:
            return base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError) as error:
            raise ActionFailed(f"data is not base64: {error}", "result_lost") from None

    def drop(self, *values: object) -> None:
        """Forget what `put` was given, which nobody asks for again. It expires anyway where the store does not answer."""
        if keys := own(keys_of(values)):
            with contextlib.suppress(RedisError):
                self.store.unlink(*keys)

    def put_text(self, text: str, before: object = None) -> str | dict[str, Any]:
        """Return the wire form of `text`: the text itself, or a reference. Lone surrogates are replaced in blobs."""
        if len(text) * 4 <= self._threshold_bytes:
            return text
        data = text.encode("utf-8", "replace")
        return self._keep(data, before) if self._large(data) else text

    def put_printed(self, data: bytes) -> str | dict[str, Any]:
        """Return the wire form of what a command has printed, as text; bytes that are no UTF-8 are replaced.

        A large value may wait for the store, and many may at once. So the value that waits is `data` itself and no copy, if it is UTF-8.
        """
        try:
            text = data.decode()
        except UnicodeDecodeError:
            text = data.decode(errors="replace")
            data = text.encode()
        if not self._large(data):
            return text
        del text
        return self._keep(data)

    def get_text(self, value: object) -> str:
        """Return the text that `put_text` or `put_printed` was given."""
        if isinstance(value, str):
            return value
        if not isinstance(value, Mapping):
            raise ActionFailed(f"expected text or a blob reference, not {type(value).__name__}", "result_lost")
        return self._fetch(value).decode("utf-8", "replace")

    def put_json(self, value: Any, before: object = None) -> Any:
        """Return the wire form of a JSON value: the value itself, or a reference. Raises `TypeError` for other values."""
        data = json.dumps(value, separators=(",", ":")).encode()
        return self._keep(data, before) if self._large(data) else value

    def get_json(self, value: Any) -> Any:
        """Return the value that `put_json` was given."""
        if not (isinstance(value, Mapping) and _REFERENCE in value):
            return value
        try:
            return json.loads(self._fetch(value))
        except ValueError as error:
            raise ActionFailed(f"a blob does not hold JSON: {error}", "result_lost") from None

    def _large(self, data: bytes) -> bool:
        return len(data) > self._threshold_bytes

    def are_missing(self, values: Iterable[object]) -> bool:
        """Whether blobs are gone that values refer to."""
        keys = keys_of(values)
        return bool(keys) and self._ask(lambda: self.store.exists(*keys)) < len(keys)

    def _keep(self, data: bytes, before: object = None) -> dict[str, Any]:
        key = next(iter(keys_of((before,))), self._prefix + uuid4().hex)
        self._ask(lambda: self._write(key, data))
        return {_REFERENCE: key, "bytes": len(data)}

    def _write(self, key: str, data: bytes) -> None:
        """Write a value. A large one grows under another key until it is whole: somebody may read this one meanwhile."""
        if len(data) <= PART_BYTES:
            self.store.set(key, data, px=self._ttl_ms)
            return
        growing = f"{key}.{uuid4().hex}"
        for begin in range(0, len(data), PART_BYTES):
            # A part may come twice, also long after: then it changes nothing, or makes a key that expires.
            with self.store.pipeline(transaction=True) as pipeline:
                pipeline.strlen(growing)
                pipeline.setrange(growing, begin, data[begin : begin + PART_BYTES])
                pipeline.pexpire(growing, GROWING_MS)
                if pipeline.execute()[0] < begin:
                    raise RedisError("the first parts of a large value are gone")
            self._between_parts()
        with self.store.pipeline(transaction=True) as pipeline:
            pipeline.rename(growing, key)
            pipeline.pexpire(key, self._ttl_ms)
            pipeline.execute()

    def _fetch(self, reference: Mapping[str, Any]) -> bytes:
        key = reference.get(_REFERENCE)
        if not isinstance(key, str) or not key.startswith(BLOB_KEY_PREFIX):
            raise ActionFailed(f"not a blob reference: {str(dict(reference))[:80]}", "result_lost")
        data = self._ask(lambda: self.store.get(key))
        if data is None:
            problem = f"a large value ({reference.get('bytes')} bytes) is no longer in the result store: it has expired"
            raise ActionFailed(problem, "result_lost")
        if not isinstance(data, bytes):
            raise ActionFailed("blobs need a Redis client without decode_responses", "result_lost")
        if len(data) != reference.get("bytes"):
            raise ActionFailed(f"a large value has {len(data)} bytes in the result store, not {reference.get('bytes')}", "result_lost")
        return data

    def _ask(self, command: Callable[[], T]) -> T:
        """Carry out a command that may be repeated, until the store answers or patience is over."""
        call, pause_s, deadline = object(), _FIRST_PAUSE_S, clock.monotonic() + self._patience_s
        try:
            while True:
                try:
                    return command()
                except RedisError as error:
                    now = clock.monotonic()
                    if now >= deadline:
                        raise
                    # A store may answer reads and refuse writes: what another call hears of it says nothing of those that wait.
                    if not self._waiting:
                        _log.warning("the result store is away, large values wait for it: %s", error)
                    self._waiting.add(call)
                    if self._closing.wait(min(pause_s, deadline - now)):
                        raise
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        finally:
            self._waiting.discard(call)
