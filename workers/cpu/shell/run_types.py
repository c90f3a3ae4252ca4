"""What a run is told by the outside, what comes of it, and its FIFOs."""

from __future__ import annotations

import array
import fcntl
import os
import termios
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from workers.cpu.abstract import Given, Status


@dataclass(frozen=True, slots=True)
class Hooks:
    """What the loop asks of the outside, and tells it.

    `killed` returns why the command is to be ended, if it is; it is asked after a wake-up. `on_ending` is called before a kill. `given` is
    what the command has been given and has not been handed yet.
    """

    killed: Callable[[], str | None]
    on_ending: Callable[[], None]
    given: deque[Given]


class NotBegun(Exception):
    """Raised when the shell ended before it came to the command, which may therefore be handed over again."""


@dataclass(slots=True)
class Ending:
    """Why and how the command ended, before its output is taken."""

    status: Status
    exit_code: int | None
    reason: str
    cpu_s: float
    cause: str = ""


def waits_in(descriptor: int) -> int:
    """Return how many bytes can be read."""
    waiting = array.array("i", [0])
    fcntl.ioctl(descriptor, termios.FIONREAD, waiting)
    return waiting[0]


def both_ends(path: str) -> int:
    """Open a FIFO so that it neither blocks nor hangs up."""
    return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
