"""The addresses at which the servers of an environment are looked for, and sockets for them.

Rules: the standard library only; the fork server imports this file.
"""

from __future__ import annotations

import contextlib
import socket
from typing import Final

LOOPBACKS: Final[dict[int, str]] = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}
"""The loopback address of each family of addresses, in the order in which they are tried."""


def make_sockets() -> list[socket.socket]:
    """Return a socket of TCP for each loopback address, in the network that this thread is in. Raises `OSError` where there is none."""
    made = []
    for family in LOOPBACKS:
        # A kernel may lack one of them.
        with contextlib.suppress(OSError):
            made.append(socket.socket(family, socket.SOCK_STREAM))
    return made or [socket.socket(socket.AF_INET, socket.SOCK_STREAM)]
