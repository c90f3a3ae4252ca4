"""What a running command can be given: input, its end, signals, another size of its terminal.

Only the messages are made here (`tangram.wire`). Each sender numbers what it gives one command. So the receiver drops a message
that comes twice, and puts messages in order that have passed each other.
"""

from __future__ import annotations

import base64
import secrets
import signal
from collections import OrderedDict
from collections.abc import Sequence

from tangram import clock
from tangram.errors import InvalidAction
from tangram.wire import GIVEN_BYTES

What = tuple[str | int, ...]

_REMEMBERED = 10_000
"""Commands whose numbers are remembered. Of any other, what is given comes from a fresh sender."""


def data(given: bytes) -> What:
    """Return input of at most `GIVEN_BYTES`. Raises `InvalidAction`."""
    if not isinstance(given, (bytes, bytearray, memoryview)):
        raise InvalidAction("data", f"must be bytes, not {type(given).__name__}")
    if not 0 < len(given) <= GIVEN_BYTES:
        raise InvalidAction("data", f"must be 1 to {GIVEN_BYTES} bytes at a time, not {len(given)}")
    return ("data", base64.b64encode(given).decode("ascii"))


def end() -> What:
    """Return the end of the input."""
    return ("end",)


def signal_of(number: int) -> What:
    """Return a signal. Raises `InvalidAction` where there is none of this number."""
    if isinstance(number, bool) or number not in signal.valid_signals():
        raise InvalidAction("number", f"must be the number of a signal, not {number!r}")
    return ("signal", int(number))


def size(rows: int, columns: int) -> What:
    """Return the size of a terminal, in characters. Raises `InvalidAction`."""
    for name, value in (("rows", rows), ("columns", columns)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 0xFFFF:
            raise InvalidAction(name, f"must be from 1 to {0xFFFF}, not {value!r}")
    return ("size", rows, columns)


def terminal(pty: Sequence[int] | None) -> list[int] | None:
    """Return rows and columns of a terminal that a command is to have; None where it is to have none. Raises `InvalidAction`."""
    if pty is None:
        return None
    if isinstance(pty, str) or not isinstance(pty, Sequence) or len(pty) != 2:
        raise InvalidAction("pty", f"must be rows and columns, not {pty!r}")
    size(*pty)
    return list(pty)


class InputMessages:
    """Makes the messages of one client; safe for use by many threads."""

    def __init__(self, client_id: str, job: str) -> None:
        self._client_id, self._job = client_id, job
        self._lock = clock.lock()
        self._senders: OrderedDict[str, tuple[str, int]] = OrderedDict()

    def message(self, task_id: str, what: What) -> dict[str, object]:
        """Return the control request that gives a command the next thing; it must be sent before the one after it is made."""
        with self._lock:
            sender, number = self._senders.get(task_id) or (secrets.token_hex(8), 0)
            self._senders[task_id] = (sender, number + 1)
            self._senders.move_to_end(task_id)
            if len(self._senders) > _REMEMBERED:
                self._senders.popitem(last=False)
        words = {"id": task_id, "client": self._client_id, "job": self._job, "sender": sender, "number": number + 1, "what": list(what)}
        return {"give": words}
