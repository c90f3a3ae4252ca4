"""What running commands print, on its way into the result store: one Redis stream for each command that asks for it.

A command's thread only appends to a buffer. One thread of the worker sends what all commands have gathered, as one pipeline every
`GATHER_S` seconds, and at once where one has ended. `tangram.wire` has a table of the entries.

Readers say how far they have read. While more than `WINDOW_BYTES` are not read yet, the stream `is_full`. The command's output is then left
in its pipe. A command that goes on printing blocks, as it would on any pipe. So a reader that keeps reading gets everything. Up to another
`timeout_s` of that time does not count towards the command's own.

| output is not read, as | then |
|---|---|
| the reader or the store is slow | the command waits for it |
| nobody reads, or the store is away, for `HELD_S` without any progress | the command goes on without its readers until one reads again |
| meanwhile | what exceeds `BUFFER_BYTES` here, or `ALL_BUFFERS_BYTES` of all, is dropped; entries' ids tell how much |
| the store is away for `PATIENCE_S` after the end of a command | the rest of its output is dropped |
| something else has the key of the stream | what goes out meanwhile is dropped |

Entries have at most `ENTRY_BYTES`. They are sent again where the store did not answer, which their ids make harmless. A key expires
`OUTPUT_TTL_S` after its last entry. In the store a command keeps its last `KEPT_BYTES` of output.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from redis import Redis, ResponseError

from tangram.wire import OUTPUT_KEY_PREFIX, OUTPUT_TTL_S, READ_KEY_PREFIX

log = logging.getLogger(__name__)

GATHER_S: Final = 0.02
ENTRY_BYTES: Final = 32 * 1024
BUFFER_BYTES: Final = 1024 * 1024
ALL_BUFFERS_BYTES: Final = 64 * 1024 * 1024
KEPT_BYTES: Final = 1024 * 1024
PATIENCE_S: Final = 60.0
WINDOW_BYTES: Final = KEPT_BYTES // 2
"""Less than the store keeps, so that what has not been read is there."""
HELD_S: Final = 10.0

_ENTRY_COST = 64
"""Bytes that the store needs for an entry beside its data, about."""
ENTRIES_AT_ONCE = 16
"""Entries of one command in one pipeline."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0
_NOT_AGAIN = ("equal or smaller", "WRONGTYPE")
"""What Redis says of an entry that is not sent again: it has had the id, or something else has the key."""
END: Final = "end"


@dataclass(slots=True)
class _Entry:
    """One entry of a stream, with `fields` beside the data of `name`; after it the store keeps at most `most_kept` entries.

    `position` counts the bytes that were printed up to its end.
    """

    position: int
    name: str
    data: bytearray
    fields: dict[str, str] = field(default_factory=dict)
    most_kept: int = 0

    @property
    def id(self) -> str:
        """Return its id in the store."""
        return f"{self.position}-{int(self.name == END)}"


class OutputStream:
    """The output of one command; made by `OutputStreams.open`. Its methods never block and never fail."""

    def __init__(self, owner: OutputStreams, action_id: str, position: int = 0) -> None:
        self.key, self.read_key = OUTPUT_KEY_PREFIX + action_id, READ_KEY_PREFIX + action_id
        self.entries: deque[_Entry] = deque()
        self.in_flight = 0
        """How many of the first entries are being sent."""
        self.waiting_bytes = 0
        self.ended_at: float | None = None
        self._owner = owner
        self._position = position
        self._kept: deque[int] = deque()
        self._kept_bytes = 0
        self._read = 0
        self._unread: deque[tuple[int, int]] = deque()
        """Of each entry that nobody has read: where it ends, and what it takes in the store."""
        self._unread_bytes = 0
        self._held_since: float | None = None

    @property
    def wants_reader(self) -> bool:
        """Whether it matters how far it has been read; the lock must be held."""
        return self._unread_bytes > WINDOW_BYTES // 2

    def is_full(self) -> bool:
        """Say whether the command is to be held back now."""
        with self._owner.changed:
            if self._unread_bytes <= WINDOW_BYTES and self._owner.waiting_bytes <= ALL_BUFFERS_BYTES // 2:
                self._held_since = None
                return False
            now = time.monotonic()
            self._held_since = now if self._held_since is None else self._held_since
            if now >= self._held_since + HELD_S:
                return False
            self._owner.hold(self)
            return True

    def note_read(self, position: int) -> None:
        """Take note of how far somebody has read; the lock must be held."""
        if position <= self._read:
            return
        self._read, self._held_since = position, None
        while self._unread and self._unread[0][0] <= position:
            self._unread_bytes -= self._unread.popleft()[1]

    def write(self, name: str, data: bytes) -> None:
        """Add what the command printed on the stream `name`."""
        with self._owner.changed:
            if self.ended_at is not None:
                return
            if self.waiting_bytes + len(data) > BUFFER_BYTES or self._owner.waiting_bytes + len(data) > ALL_BUFFERS_BYTES:
                self._position += len(data)
                return
            for start in range(0, len(data), ENTRY_BYTES):
                self._append(name, data[start : start + ENTRY_BYTES])
            self._count(len(data))
            self._owner.note(self)

    def end(self, status: str, reason: str = "", cause: str = "", node: str = "") -> None:
        """Say how the command has ended, and why; nothing comes after that. `node` is where its environment was lost."""
        with self._owner.changed:
            if self.ended_at is None:
                self.entries.append(
                    _Entry(self._position, END, bytearray(status.encode()), {"reason": reason, "cause": cause, "node": node})
                )
                self._count(len(status))
                self.ended_at = time.monotonic()
                self._owner.note(self, at_once=True)

    def take(self) -> list[_Entry]:
        """Return the entries to be sent next; the lock must be held."""
        taken = list(islice(self.entries, ENTRIES_AT_ONCE))
        for entry in taken[self.in_flight :]:
            size = len(entry.data) + _ENTRY_COST
            self._kept.append(size)
            self._kept_bytes += size
            while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
                self._kept_bytes -= self._kept.popleft()
            entry.most_kept = len(self._kept)
        self.in_flight = len(taken)
        return taken

    def sent(self) -> None:
        """Forget the entries that were taken last; the lock must be held."""
        for _ in range(self.in_flight):
            self._count(-len(self.entries.popleft().data))
        self.in_flight = 0

    def forget(self) -> None:
        """Forget all entries; the lock must be held."""
        self._count(-self.waiting_bytes)
        self.entries.clear()
        self.in_flight = 0

    def _append(self, name: str, data: bytes) -> None:
        before, self._position = self._position, self._position + len(data)
        last = self.entries[-1] if len(self.entries) > self.in_flight else None
        if last is not None and last.name == name and last.position == before and len(last.data) + len(data) <= ENTRY_BYTES:
            last.data += data
            last.position = self._position
            size = self._unread.pop()[1] + len(data)
            self._unread_bytes += len(data)
        else:
            self.entries.append(_Entry(self._position, name, bytearray(data)))
            size = len(data) + _ENTRY_COST
            self._unread_bytes += size
        self._unread.append((self._position, size))
        while self._unread_bytes > KEPT_BYTES:  # the store keeps no more
            self._unread_bytes -= self._unread.popleft()[1]

    def _count(self, change: int) -> None:
        self.waiting_bytes += change
        self._owner.waiting_bytes += change


class OutputStreams:
    """The streams of all commands of a worker, and the thread that sends them."""

    def __init__(self, store: Redis) -> None:
        """Send to `store`, on one of its connections; the thread starts with the first output."""
        self.changed = threading.Condition()
        self.waiting_bytes = 0
        self._store = store
        self._waiting: dict[str, OutputStream] = {}
        self._held: dict[str, OutputStream] = {}
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._at_once = False

    def open(self, action_id: str, position: int = 0) -> OutputStream:
        """Return the stream of a command that begins, or that has printed `position` bytes under the worker before this one."""
        return OutputStream(self, action_id, position)

    def note(self, stream: OutputStream, *, at_once: bool = False) -> None:
        """Have a stream sent that has entries, perhaps `at_once`; the lock must be held."""
        self._at_once |= at_once
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tangram-output", daemon=True)
            self._thread.start()
        self._waiting[stream.key] = stream
        self.changed.notify_all()

    def hold(self, stream: OutputStream) -> None:
        """Look how far a stream has been read, whose command is held back; the lock must be held."""
        if stream.key not in self._held:
            self._held[stream.key] = stream
            self.changed.notify_all()

    def close(self, timeout_s: float = 5.0) -> None:
        """Send what has gathered, for at most `timeout_s` seconds, and end the thread."""
        with self.changed:
            thread = self._thread
            self._closing.set()
            self.changed.notify_all()
        if thread is not None:
            thread.join(timeout_s)

    def _run(self) -> None:
        pause_s = 0.0
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self._waiting or self._held or self._closing.is_set())
                batch = [(stream, stream.take()) for stream in self._waiting.values()]
                read = [stream for stream, _ in batch if stream.wants_reader and stream.key not in self._held]
                read += self._held.values()
                self._held = {}
                self._at_once = False
            if not batch and self._closing.is_set():
                return
            began = time.monotonic()
            try:
                self._look_for_readers(read)
                self._send(batch)
            except Exception as error:  # redis-py lets others through than its own, and none ends the thread of all commands
                if self._closing.is_set():
                    return
                if not pause_s:
                    log.warning("the output of %d commands cannot be published yet: %s", len(batch), error)
                self._give_up()
                pause_s = min(max(_FIRST_PAUSE_S, 2 * pause_s), _LONGEST_PAUSE_S)
                self._closing.wait(pause_s)
            else:
                pause_s = 0.0
                with self.changed:
                    self.changed.wait_for(lambda: self._at_once or self._closing.is_set(), began + GATHER_S - time.monotonic())

    def _send(self, batch: list[tuple[OutputStream, list[_Entry]]]) -> None:
        """Send entries and forget them. Raises what redis-py raises, with nothing forgotten, also what the store answers with an error."""
        with self._store.pipeline(transaction=False) as pipe:
            for stream, entries in batch:
                for entry in entries:
                    fields: dict[Any, Any] = {
                        entry.name: bytes(entry.data),
                        **{name: value for name, value in entry.fields.items() if value},
                    }
                    pipe.xadd(stream.key, fields, id=entry.id, maxlen=entry.most_kept, approximate=False)
                pipe.expire(stream.key, OUTPUT_TTL_S)
            answers = pipe.execute(raise_on_error=False)
        for answer in answers:
            if isinstance(answer, ResponseError) and not any(words in str(answer) for words in _NOT_AGAIN):
                self._store.connection_pool.disconnect(inuse_connections=False)  # as LEAVE_REPLICAS does, which sees no answer here
                raise answer
        with self.changed:
            for stream, _ in batch:
                stream.sent()
                if not stream.entries:
                    del self._waiting[stream.key]

    def _look_for_readers(self, streams: list[OutputStream]) -> None:
        """Learn how far streams have been read. Raises what redis-py raises."""
        if not streams:
            return
        positions: Any = self._store.mget([stream.read_key for stream in streams])
        with self.changed:
            for stream, position in zip(streams, positions, strict=True):
                if isinstance(position, bytes) and position.isdigit():
                    stream.note_read(int(position))

    def _give_up(self) -> None:
        """Drop the output of commands that ended long ago."""
        with self.changed:
            for key, stream in tuple(self._waiting.items()):
                if stream.ended_at is not None and time.monotonic() > stream.ended_at + PATIENCE_S:
                    stream.forget()
                    del self._waiting[key]
