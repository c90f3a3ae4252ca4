"""The networks of an environment, and how the worker connects to a port there.

| sandbox                     | networks of an environment    | sockets in it are made by                            |
|-----------------------------|-------------------------------|------------------------------------------------------|
| process, with bubblewrap    | one for each session          | a process that the fork server forks, which enters   |
| containers                  | one                           | a thread of the worker, which enters and ends        |
| process, not set apart      | the host's                    | the worker; only sockets of the session are reached  |

A socket belongs to the network in which it was made. So no more than that is done inside: the socket comes out unconnected, and the
worker connects it to loopback. No byte of an exchange is read by a process that has entered a network.
"""

from __future__ import annotations

import errno
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import ExitStack

from workers.cpu.errors import NoAnswer, NothingListens
from workers.cpu.ports.listeners import listeners, sockets_of
from workers.cpu.ports.loopback import LOOPBACKS, make_sockets
from workers.cpu.ports.wait import WRITABLE, Wait

_REFUSED = (errno.ECONNREFUSED, errno.EADDRNOTAVAIL, errno.ENETUNREACH)


class Network(ABC):
    """A network in which servers of an environment listen."""

    @abstractmethod
    def make_sockets(self) -> list[socket.socket]:
        """Return sockets in this network as `loopback.make_sockets` does. Raises `SandboxError`."""

    def reaches(self, port: int, loopback: str) -> frozenset[int] | None:
        """Return which sockets may take a connection, by inode; None where another program's may.

        In a network of the environment's own nobody else listens, and nobody asks which they are.
        """
        return frozenset()

    def connect(self, port: int, wait: Wait) -> socket.socket | None:
        """Return a connection to a port, which does not block; None where nothing of the environment listens.

        Raises `NoAnswer` when what listens takes no connection; `SandboxError` when the network cannot be entered; `ActionCancelled` or
        `ActionTimedOut` as `Wait.until`.
        """
        with ExitStack() as closing:
            for connection in [closing.enter_context(each) for each in self.make_sockets()]:
                loopback = LOOPBACKS[connection.family]
                before = self.reaches(port, loopback)
                if before is None or not _connect(connection, (loopback, port), wait):
                    continue
                after = self.reaches(port, loopback)
                if after is not None and after <= before:
                    return connection.dup()
        return None


class HostNetwork(Network):
    """The worker's own network, for a session whose processes `members` returns: nothing else on the host can be reached."""

    def __init__(self, members: Callable[[], Iterable[int]]) -> None:
        self._members = members

    def make_sockets(self) -> list[socket.socket]:
        return make_sockets()

    def reaches(self, port: int, loopback: str) -> frozenset[int] | None:
        """Return which sockets of the session may take a connection; see the base class. Of several, the kernel chooses one."""
        takers = frozenset(each.inode for each in listeners(port) if each.may_take(loopback))
        return takers if takers and takers <= sockets_of(self._members()) else None


def connect(networks: Iterable[Network], port: int, wait: Wait) -> socket.socket:
    """Return a connection to a port, in the first of `networks` in which something listens there.

    Raises `NothingListens` when there is none; `SandboxError`, `ActionCancelled` or `ActionTimedOut` as `Network.connect`.
    """
    for network in networks:
        connection = network.connect(port, wait)
        if connection is not None:
            return connection
    reached = "a program there is reached once it listens on 127.0.0.1 or on all addresses"
    raise NothingListens(f"nothing in the environment listens on port {port}: {reached}")


def _connect(connection: socket.socket, address: tuple[str, int], wait: Wait) -> bool:
    """Connect; return False where the address refuses."""
    connection.setblocking(False)
    code = connection.connect_ex(address)
    if code == errno.EINPROGRESS:
        wait.until(connection, WRITABLE)
        code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code and code not in _REFUSED:
        raise NoAnswer(f"the server on port {address[1]} takes no connection: {os.strerror(code)}")
    return code == 0
