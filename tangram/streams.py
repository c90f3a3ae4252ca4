"""Reads what commands print while they run, for all readers of a client, on one thread and one connection.

A worker publishes the output of a command as a Redis stream (`tangram.wire`). The thread asks for all streams that are read at once:

| what comes | then |
|---|---|
| an entry with output | it waits for its reader; a reader that leaves `_MOST_WAITING_BYTES` lying is not read for meanwhile |
| `READ_STEP_BYTES` more for a reader | the worker is told, which holds a command back whose output is not read |
| the entry that says how the command has ended | its readers end, with the action's error where it ended without a result |
| nothing, for `_GRACE_S` after the action's result was stored | the same: its worker is dead, or it never ran |
| no answer, for `outage_s` | all readers end with `StackUnreachable`; trying goes on with the next one |
| something else has the key of a stream | its readers end with `StackUnreachable`, and no others |

The store blocks the thread until something comes, for `_BLOCK_S` at most; a new reader sends it an entry of its own (`_WAKE_PREFIX`).
The thread ends when nobody reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from typing import Any

from redis import Redis, ResponseError

from tangram.action import check_name
from tangram.decode import read_meta, stored_value
from tangram.errors import BY_STATUS, ActionError, ActionFailed, EnvironmentLost, InvalidAction, StackUnreachable, TangramError
from tangram.results import Chunk
from tangram.wire import OUTPUT_KEY_PREFIX, OUTPUT_TTL_S, READ_KEY_PREFIX, RESULT_KEY_PREFIX

_BLOCK_S, _SHORT_BLOCK_S = 1.0, 0.05
_GRACE_S = 1.0
_CHECK_S = 0.5
"""How often the results of actions are looked for whose output is read."""
READ_STEP_BYTES = 128 * 1024
_MOST_WAITING_BYTES = 512 * 1024
_ENTRIES_AT_ONCE = 64
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_WAKE_PREFIX = OUTPUT_KEY_PREFIX + "wake-"
_WAKE_TTL_S = 60
_WITH_RESULT = ("succeeded", "timed_out")


class Reading:
    """One reader of the output of one command; `wake` is called when there is something for it.

    `result` is where this client waits for the end of the action, if it does.
    """

    def __init__(self, task_id: str, after: int, wake: Callable[[], None], result: Future[Any] | None) -> None:
        check_name("task_id", task_id)  # before the thread, which reads for all, gets it
        self.task_id, self.after, self.wake, self.result = task_id, after, wake, result
        self.chunks: deque[Chunk] = deque()
        self.came_bytes = self.taken_bytes = 0
        """What was put into `chunks` by the thread, and taken out by the reader, so far."""
        self.acknowledged = after
        """Up to where the worker knows that output has been read."""
        self.ended = False
        self.error: TangramError | None = None
        self.end_seen_at: float | None = None
        """When the result was found, on the monotonic clock, or the last output after that."""
        self.end_found: TangramError | None = None

    def take(self) -> Chunk:
        """Return the next chunk, of which there is one."""
        chunk = self.chunks.popleft()
        self.taken_bytes += len(chunk.data)
        return chunk

    def end(self, error: TangramError | None = None) -> None:
        """Let the reader know that nothing more comes."""
        self.error, self.ended = error, True
        self.wake()


class OutputReader:
    """The thread that reads for all readers of a client; it starts with the first one. Safe for use by many threads."""

    def __init__(self, store: Redis, connect_timeout_s: float, outage_s: float) -> None:
        """Read from `store`, of which it uses one connection, and a second one for moments."""
        self._store = store
        self._outage_s = outage_s
        self._block_s = min(_BLOCK_S, connect_timeout_s / 2)
        self._lock = threading.Lock()
        self._readings: set[Reading] = set()
        self._thread: threading.Thread | None = None
        self._wake_key = _WAKE_PREFIX + secrets.token_hex(8)
        self._woken = "0-0"
        self._next_check = 0.0
        self._closed: Callable[[], TangramError] | None = None

    @property
    def in_use(self) -> bool:
        """Whether anybody reads."""
        return bool(self._readings)

    def read(self, task_id: str, after: str = "0", result: Future[Any] | None = None) -> Iterator[Chunk]:
        """Yield the output of a command as it comes, from behind the chunk with the id `after`; see `Handle.output`."""
        arrived = threading.Event()
        reading = self._open(Reading(task_id, _number(after), arrived.set, result))
        try:
            while not reading.ended or reading.chunks:
                arrived.wait()
                arrived.clear()
                while reading.chunks:
                    yield reading.take()
        finally:
            self._close(reading)
        if reading.error is not None:
            raise reading.error

    async def read_async(self, task_id: str, after: str = "0", result: Future[Any] | None = None) -> AsyncIterator[Chunk]:
        """Yield the output of a command as it comes, for coroutines."""
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody reads any more
                loop.call_soon_threadsafe(arrived.set)

        reading = Reading(task_id, _number(after), wake, result)
        try:
            # This may have to wait for the store.
            await asyncio.to_thread(self._open, reading)
            while not reading.ended or reading.chunks:
                await arrived.wait()
                arrived.clear()
                while reading.chunks:
                    yield reading.take()
        finally:
            self._close(reading)
        if reading.error is not None:
            raise reading.error

    def close(self, make_error: Callable[[], TangramError]) -> None:
        """End all readers with an error of their own, and the thread."""
        with self._lock:
            self._closed = make_error
            readings, self._readings = self._readings, set()
            thread = self._thread
        for reading in readings:
            reading.end(make_error())
        if thread is not None and thread is not threading.current_thread():
            self._wake()
            thread.join(self._block_s)

    def _open(self, reading: Reading) -> Reading:
        with self._lock:
            if self._closed is not None:
                raise self._closed()
            if not reading.ended:  # a thread may begin only after its coroutine was cancelled
                self._readings.add(reading)
            running = self._thread is not None
            if not running:
                self._thread = threading.Thread(target=self._run, name="tangram-output", daemon=True)
                self._thread.start()
        if running:
            self._wake()
        return reading

    def _close(self, reading: Reading) -> None:
        with self._lock:
            reading.ended = True
            self._readings.discard(reading)

    def _wake(self) -> None:
        """Have the store answer the thread now; where that fails, it answers after `_BLOCK_S`."""
        with contextlib.suppress(Exception), self._store.pipeline(transaction=False) as pipe:
            pipe.xadd(self._wake_key, {"wake": ""}, maxlen=1, approximate=False)
            pipe.expire(self._wake_key, _WAKE_TTL_S)
            pipe.execute()

    def _run(self) -> None:
        down_since, pause_s = None, _FIRST_PAUSE_S
        while readings := self._current():
            try:
                self._read(readings)
                down_since, pause_s = None, _FIRST_PAUSE_S
            except Exception as error:  # as in the feed: redis-py lets others through than its own, and none ends the thread of all readers
                down_since = down_since or time.monotonic()
                if time.monotonic() - down_since >= self._outage_s:
                    for reading in readings:
                        reading.end(_unreadable(reading, error))
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _current(self) -> list[Reading]:
        """Return who reads; where that is nobody, the thread is over."""
        with self._lock:
            readings = [reading for reading in self._readings if not reading.ended]
            if not readings:
                self._thread = None
            return readings

    def _read(self, readings: list[Reading]) -> None:
        """Ask the store once for what has come, and hand it over. Raises what redis-py raises."""
        wanted: dict[str, list[Reading]] = {}
        is_full = False
        for reading in readings:
            if reading.came_bytes - reading.taken_bytes < _MOST_WAITING_BYTES:
                wanted.setdefault(OUTPUT_KEY_PREFIX + reading.task_id, []).append(reading)
            else:
                is_full = True
        positions: dict[Any, Any] = {key: f"{min(one.after for one in group)}-0" for key, group in wanted.items()}
        positions[self._wake_key] = self._woken
        block_s = _SHORT_BLOCK_S if is_full else self._block_s
        block_s = max(_SHORT_BLOCK_S, min(block_s, self._next_check - time.monotonic()))
        try:
            found: Any = self._store.xread(positions, count=_ENTRIES_AT_ONCE, block=round(block_s * 1000))
        except ResponseError as error:
            if "WRONGTYPE" not in str(error):
                raise
            for key, group in wanted.items():
                if self._store.type(key) not in (b"stream", b"none"):
                    for reading in group:
                        reading.end(_unreadable(reading, error))
            return
        for raw, entries in _items(found):
            key = raw.decode()
            if key == self._wake_key:
                self._woken = entries[-1][0].decode()
                continue
            for entry, fields in entries:
                number = int(entry.partition(b"-")[0])
                for reading in wanted[key]:
                    if number > reading.after or b"end" in fields:
                        _take(reading, number, fields)
            for reading in wanted[key]:
                reading.wake()
        self._tell([reading for reading in readings if reading.after >= reading.acknowledged + READ_STEP_BYTES and not reading.ended])
        if time.monotonic() >= self._next_check:
            self._next_check = time.monotonic() + _CHECK_S
            self._look_for_ends([reading for reading in readings if not reading.ended])

    def _tell(self, readings: list[Reading]) -> None:
        """Tell the workers how far output has been read."""
        if not readings:
            return
        with self._store.pipeline(transaction=False) as pipe:
            for reading in readings:
                pipe.set(READ_KEY_PREFIX + reading.task_id, reading.after, ex=OUTPUT_TTL_S)
            pipe.execute()
        for reading in readings:
            reading.acknowledged = reading.after

    def _look_for_ends(self, readings: list[Reading]) -> None:
        """End those whose action has a result, and whose stream has been silent since."""
        for reading in readings:
            if reading.end_seen_at is None and reading.result is not None and reading.result.done():
                error = reading.result.exception()
                reading.end_found = error if isinstance(error, TangramError) else None
                reading.end_seen_at = time.monotonic()
        unknown = [reading for reading in readings if reading.end_seen_at is None]
        if unknown:
            raws = self._store.mget([RESULT_KEY_PREFIX + reading.task_id for reading in unknown])
            for reading, raw in zip(unknown, raws, strict=True):
                if isinstance(raw, bytes):
                    _note_result(reading, raw)
        for reading in readings:
            if reading.end_seen_at is not None and time.monotonic() >= reading.end_seen_at + _GRACE_S and not reading.chunks:
                reading.end(reading.end_found)


def _take(reading: Reading, number: int, fields: dict[bytes, bytes]) -> None:
    if reading.end_seen_at is not None:
        reading.end_seen_at = time.monotonic()
    for name in ("stdout", "stderr"):
        if (data := fields.get(name.encode())) is not None:
            reading.chunks.append(Chunk(name, data, str(number), number - len(data) - reading.after))
            reading.came_bytes += len(data)
    if (status := fields.get(b"end")) is not None:
        if number > reading.after:
            reading.chunks.append(Chunk("stdout", b"", str(number), number - reading.after))
        reason, node, cause = (fields.get(name, b"").decode("utf-8", "replace") for name in (b"reason", b"node", b"cause"))
        reading.end(_error_of(status.decode(), reason, node, cause))
    reading.after = number


def _unreadable(reading: Reading, error: Exception) -> StackUnreachable:
    return StackUnreachable(f"the output of {reading.task_id} cannot be read: {error}")


def _error_of(status: str, reason: str, node: str, cause: str) -> ActionError | None:
    """Return the error of an action that has ended so; None where it has a result."""
    if status in _WITH_RESULT:
        return None
    return EnvironmentLost(reason, node, cause or "environment_lost") if node else BY_STATUS.get(status, ActionFailed)(reason, cause)


def _note_result(reading: Reading, raw: bytes) -> None:
    """Note that the action has ended, if that is what the store says of it."""
    try:
        meta = read_meta(raw)
        if not meta.final:
            return
        stored_value("cpu.exec", meta)
    except TangramError as error:
        reading.end_found = error
    reading.end_seen_at = time.monotonic()


def _items(found: Any) -> list[tuple[bytes, list[tuple[bytes, dict[bytes, bytes]]]]]:
    """Return what `XREAD` answered, stream by stream; the answer's form differs between versions of the protocol."""
    if isinstance(found, dict):
        return [(key, entries[0] if len(entries) == 1 and isinstance(entries[0], list) else entries) for key, entries in found.items()]
    return [(key, entries) for key, entries in found or ()]


def _number(after: str) -> int:
    """Return the number of a chunk's id. Raises `InvalidAction`."""
    if not isinstance(after, str) or not after.isascii() or not after.isdigit() or len(after) > 15:
        raise InvalidAction("after", f'must be the id of a chunk, or "0", not {after!r}')
    return int(after)
