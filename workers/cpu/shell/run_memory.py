"""What a command has printed, and how it stands, in memory that outlives the worker.

Each session has two files in memory (`memfd_create`), whose descriptors the fork server has copies of (`handover/protocol.py`). A worker
may be killed at any moment, so nothing is written at its end. What a successor needs is there already:

| where             | what                                                                   | written                                |
|-------------------|------------------------------------------------------------------------|----------------------------------------|
| both files, from  | what the command has printed. The kernel moves it from the FIFO, so it | while the command runs                 |
| `STATE_BYTES` on  | is either in the FIFO or here. Their sizes say how much it has printed |                                        |
| the first file,   | the state of the run: its name, its action, when it began, what earlier| once, before the shell is told to begin|
| before that       | commands have left, and the message of its action                      |                                        |
|                   | figures of its meter                                                   | with each sample                       |
|                   | its report, which the kernel moves from the FIFO, too                  | while the command runs                 |
|                   | the state again, with how it has ended otherwise. Eight bytes say      | once it has                            |
|                   | which of the two counts                                                |                                        |

| state of the memory | meaning                                                            | next                                |
|---------------------|--------------------------------------------------------------------|-------------------------------------|
| empty               | no command, or the end of the last one has been told               | a command begins: in use            |
| in use              | a command runs, or nobody may have been told of its end            | its end is told: empty; next command|

A successor goes on with what it finds in use. A state without a message says that its command cannot be gone on with.

The successor may be of another release. So the `FORMAT` of all this is in the first file, too. Whoever writes something else there counts
it up, and reads the format before it as well: `tests/upgrade/test_formats.py` has its bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import struct
import threading
from collections.abc import Mapping
from typing import Any

from workers.cpu.errors import SessionUnavailable
from workers.cpu.libc import libc

FORMAT = 1
"""The format that is written here. Memory that says none has format 0, in which a state without a place begins at `_TEXT_AT`."""

STATE_BYTES = 64 * 1024
"""The part of a file before what was printed. A message that does not fit makes its command one that cannot be gone on with."""

_KEEP_SIZE_PUNCH_HOLE = 0x01 | 0x02
_PUNCH_BYTES, _WORTH_BYTES = 1 << 20, 1 << 16
_PLACE, _FIGURES, _HEAD = struct.Struct("<2I"), struct.Struct("<5d"), struct.Struct("<3I")
_FIGURES_AT, _REPORT_AT, _TEXT_AT = 64, 128, 512
_REPORT_BYTES = _TEXT_AT - _REPORT_AT

NAMES = ("memory", "errors")
"""What the two files are called among the descriptors of a session."""


class Printed:
    """What a command has printed on one stream: the part of a file after `STATE_BYTES`. Its middle may be dropped."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.size = max(0, os.fstat(descriptor).st_size - STATE_BYTES)
        self._dropped_to = 0

    def empty(self) -> None:
        """Forget all of it."""
        if self.size:
            os.ftruncate(self.descriptor, STATE_BYTES)
        self.size = self._dropped_to = 0

    def take(self, stream: int, most: int) -> int:
        """Move what is in a FIFO here; return how much that was, 0 at its end. Raises `BlockingIOError` where nothing is there yet."""
        came = os.splice(stream, self.descriptor, most, offset_dst=STATE_BYTES + self.size, flags=os.SPLICE_F_NONBLOCK)
        self.size += came
        return came

    def add(self, data: bytes) -> None:
        """Add what was read elsewhere."""
        self.size += os.pwrite(self.descriptor, data, STATE_BYTES + self.size)

    def read(self, begin: int, length: int) -> bytes:
        """Return a part of it."""
        return os.pread(self.descriptor, length, STATE_BYTES + begin)

    def drop(self, begin: int, end: int) -> None:
        """Give memory back that nobody will ask for."""
        if end - max(begin, self._dropped_to) >= _PUNCH_BYTES:
            begin = max(begin, self._dropped_to)
            place, length = ctypes.c_long(STATE_BYTES + begin), ctypes.c_long(end - begin)
            libc.fallocate(self.descriptor, _KEEP_SIZE_PUNCH_HOLE, place, length)
            self._dropped_to = end


def is_over(state: Mapping[str, Any]) -> bool:
    """Return whether a run has ended that a worker has left."""
    return "ending" in state or str(state["name"]).encode() in state["report"]


class RunMemory:
    """The memory of one session. `clear` may be called by any thread."""

    def __init__(self, descriptors: Mapping[str, int] | None = None) -> None:
        """Make it, or go on with that of the worker before this one."""
        given = descriptors or {name: os.memfd_create(name, os.MFD_CLOEXEC) for name in NAMES}
        self.descriptors = {name: given[name] for name in NAMES}
        self.printed = tuple(map(Printed, self.descriptors.values()))
        self._state_file = self.descriptors[NAMES[0]]
        self._lock = threading.Lock()
        self._state: dict[str, Any] = {}
        self._place = (0, 0)
        """How long the text of the state is, and where it begins."""
        self._is_closed = False
        if descriptors is None:
            for each in self.printed:
                os.ftruncate(each.descriptor, STATE_BYTES)

    def begin(self, state: Mapping[str, Any]) -> None:
        """Take note of a run that is about to begin; `state` has a `name` and a `message`, as JSON has it."""
        with self._lock:
            self._state = dict(state)
            if len(text := self._text()) > STATE_BYTES - _TEXT_AT:
                self._state["message"] = ""
                text = self._text()
            os.pwrite(self._state_file, _HEAD.pack(0, 0, FORMAT).ljust(_TEXT_AT, b"\0") + text, 0)
            self._point_to(len(text), _TEXT_AT)

    def take_report(self, done: int, kept: bytes) -> bytes:
        """Move what the shell has reported from its FIFO behind what is `kept` of it, and return all. Raises `BlockingIOError`."""
        if kept:
            os.pwrite(self._state_file, kept.ljust(_REPORT_BYTES, b"\0"), _REPORT_AT)
        place = _REPORT_AT + len(kept)
        came = os.splice(done, self._state_file, _TEXT_AT - place, offset_dst=place, flags=os.SPLICE_F_NONBLOCK)
        return kept + os.pread(self._state_file, came, place)

    def note(self, **changes: Any) -> None:
        """Take note of how the run stands otherwise."""
        with self._lock:
            if not self._state:
                return
            self._state |= changes
            text, (length, place) = self._text(), self._place
            if len(text) > STATE_BYTES - _TEXT_AT:
                return
            # The worker may be killed at any of these lines. Where both have room, the last text stays whole until the new one is.
            at = STATE_BYTES - len(text) if place == _TEXT_AT else _TEXT_AT
            if at < place + length and place < at + len(text):
                self._point_to(0, 0)
            os.pwrite(self._state_file, text, at)
            self._point_to(len(text), at)

    def note_figures(self, *figures: float) -> None:
        """Take note of five figures of the run's meter."""
        os.pwrite(self._state_file, _FIGURES.pack(*figures), _FIGURES_AT)

    def clear(self, name: str) -> None:
        """Take note that the end of the run `name` has been told. Another one may have begun meanwhile."""
        with self._lock:
            if self._state.get("name") == name and not self._is_closed:
                self._state = {}
                self._point_to(0, 0)
                for each in self.printed:
                    if each.size > _WORTH_BYTES:
                        each.empty()

    def _text(self) -> bytes:
        return json.dumps(self._state).encode()

    def _point_to(self, length: int, place: int) -> None:
        """Have the text of this length that begins at `place` count, or none if it has no length."""
        self._place = (length, place)
        os.pwrite(self._state_file, _PLACE.pack(length, place), 0)

    def left(self) -> dict[str, Any] | None:
        """Return the state of a run that the worker before this one has left, with its `report` and `figures`; None where there is none.

        Raises `SessionUnavailable` where another release has written it in a format that this one does not know.
        """
        head = os.pread(self._state_file, _TEXT_AT, 0).ljust(_TEXT_AT, b"\0")
        length, place, written = _HEAD.unpack_from(head)
        if written > FORMAT:
            raise SessionUnavailable(f"the memory of its commands has format {written}, and this release reads formats up to {FORMAT}")
        if not length:
            return None
        with self._lock:
            self._place = (length, place or _TEXT_AT)
            self._state = json.loads(os.pread(self._state_file, *self._place))
            return {**self._state, "report": head[_REPORT_AT:].rstrip(b"\0"), "figures": _FIGURES.unpack_from(head, _FIGURES_AT)}

    def close(self) -> None:
        """Give the descriptors back."""
        with self._lock, contextlib.suppress(OSError):
            if not self._is_closed:
                self._is_closed = True
                for descriptor in self.descriptors.values():
                    os.close(descriptor)
