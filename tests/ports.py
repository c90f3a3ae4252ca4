"""Ports for servers that tests start."""

from __future__ import annotations

import contextlib
import random
import socket
import sys

_held = contextlib.ExitStack()


def free_port() -> int:
    """Return a port of 127.0.0.1; see `free_ports`."""
    return free_ports(1)


def free_ports(count: int) -> int:
    """Return the first of `count` neighbouring ports that nobody listens at and that nobody else is given while this process runs.

    They lie below the ports that Linux gives to connections. Each is bound alone, so not where another process holds it in the same way,
    and not listened at. On Linux a server binds it, too, once both have set SO_REUSEADDR, as servers do.
    """
    for _ in range(100):
        first = random.randrange(20000, 32768 - count)
        with contextlib.suppress(OSError), contextlib.ExitStack() as bound:
            for port in range(first, first + count):
                probe = bound.enter_context(socket.socket())
                probe.bind(("127.0.0.1", port))
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if sys.platform == "linux":
                _held.enter_context(bound.pop_all())
            return first
    raise AssertionError("no free ports")
