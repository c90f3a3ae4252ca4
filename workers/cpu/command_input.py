"""Puts what running commands are given in order, and hands it on once.

Messages of one sender are numbered (`tangram.wire`). They can pass each other on the worker's threads, come twice, or come before their
command. What comes for a command that has ended is dropped.
"""

from __future__ import annotations

import base64
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from tangram.errors import InvalidAction
from tangram.wire import GIVEN_BYTES
from workers.cpu.abstract import Data, EndOfInput, Given, Signal, WindowSize

log = logging.getLogger(__name__)

MOST_EARLY: Final = 1024
"""Commands that have not come yet, for which something is kept."""
MOST_HELD_BYTES: Final = 8 * 1024 * 1024
"""What is held of one sender, as a message before it is missing or its command has not come. More than a scheduler keeps for a command."""
REMEMBERED: Final = 4096
"""Commands that have ended which are remembered."""

_COST: Final = 256
"""Bytes that a message takes beside its data, about."""


@dataclass(slots=True)
class _Sender:
    """What comes from one sender: the number of the `next` message, and later ones that came before it."""

    next: int = 1
    held: dict[int, Given] = field(default_factory=dict)
    held_bytes: int = 0


@dataclass(slots=True)
class _Command:
    """A command, its senders, and what takes in what it is given: None before it has come."""

    give: Callable[[Given], None] | None = None
    senders: dict[str, _Sender] = field(default_factory=dict)


class CommandInputs:
    """What the commands of this worker are given; safe for use by many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._commands: dict[str, _Command] = {}
        self._early: OrderedDict[str, None] = OrderedDict()
        self._ended: OrderedDict[str, None] = OrderedDict()

    @contextmanager
    def to(self, action_id: str, give: Callable[[Given], None]) -> Iterator[None]:
        """Hand to `give` what comes for a command, and what has come before; it must be quick."""
        with self._lock:
            self._early.pop(action_id, None)
            command = self._commands.setdefault(action_id, _Command())
            command.give = give
            for sender in command.senders.values():
                _hand_on(sender, give)
        try:
            yield
        finally:
            with self._lock:
                del self._commands[action_id]
                _remember(self._ended, action_id, REMEMBERED)

    def take(self, action_id: str, sender_id: str, number: int, what: Sequence[object]) -> None:
        """Take in a message; one that makes no sense is passed over, with a word in the log."""
        try:
            given = parse(what)
        except (InvalidAction, TypeError, ValueError) as error:
            log.warning("what command %s is given makes no sense: %s", action_id, error)
            return
        with self._lock:
            if action_id in self._ended:
                return
            command = self._commands.setdefault(action_id, _Command())
            if command.give is None and (oldest := _remember(self._early, action_id, MOST_EARLY)):
                del self._commands[oldest]
            sender = command.senders.setdefault(sender_id, _Sender())
            if number >= sender.next and number not in sender.held and sender.held_bytes < MOST_HELD_BYTES:
                sender.held[number] = given
                sender.held_bytes += _size_of(given)
            if command.give is not None:
                _hand_on(sender, command.give)


def _hand_on(sender: _Sender, give: Callable[[Given], None]) -> None:
    while (given := sender.held.pop(sender.next, None)) is not None:
        sender.next += 1
        sender.held_bytes -= _size_of(given)
        give(given)


def _size_of(given: Given) -> int:
    return _COST + (len(given.data) if isinstance(given, Data) else 0)


def _remember(known: OrderedDict[str, None], action_id: str, most: int) -> str | None:
    """Note a command; return the one that is forgotten for it, if any."""
    known[action_id] = None
    return known.popitem(last=False)[0] if len(known) > most else None


def parse(what: Sequence[object]) -> Given:
    """Return what a message says. Raises `InvalidAction`, `TypeError` or `ValueError`."""
    match what:
        case ["data", str(encoded)]:
            data = base64.b64decode(encoded, validate=True)
            if len(data) > GIVEN_BYTES:
                raise InvalidAction("data", f"must be at most {GIVEN_BYTES} bytes, not {len(data)}")
            return Data(data)
        case ["end"]:
            return EndOfInput()
        case ["signal", int(number)]:
            return Signal(number)
        case ["size", int(rows), int(columns)]:
            return WindowSize(rows, columns)
    raise InvalidAction("what", f"must be data, end, signal or size, not {str(what)[:40]!r}")
