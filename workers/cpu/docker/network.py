"""The network of a container, which the worker enters as the host's root."""

from __future__ import annotations

import os
import socket
import threading

from workers.cpu.docker.container import Container
from workers.cpu.errors import ContainerFailed
from workers.cpu.libc import check, libc
from workers.cpu.ports.loopback import make_sockets
from workers.cpu.ports.network import Network

CLONE_NEWNET = 0x40000000
OWN = "/proc/thread-self/ns/net"


class ContainerNetwork(Network):
    """The network that all sessions of a container share."""

    def __init__(self, container: Container) -> None:
        self._container = container

    def make_sockets(self) -> list[socket.socket]:
        """Return sockets; see the base class.

        A thread can enter a network by itself, and its end is the way out: no other thread of the worker is ever in it.
        """
        made: list[socket.socket] = []
        problems: list[str] = []

        def make() -> None:
            try:
                self._enter()
                made.extend(make_sockets())
            except OSError as error:
                problems.append(str(error))

        thread = threading.Thread(target=make, name="tangram-network")
        thread.start()
        thread.join()
        if problems:
            raise ContainerFailed(f"the network of a container cannot be entered: {problems[0]}")
        return made

    def _enter(self) -> None:
        """Have this thread be in the container's network. Raises `OSError`."""
        entrance = os.open(f"/proc/{self._container.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if self._container.has_ended():  # the id may be another process's by now
                raise OSError("the container has ended")
            if os.fstat(entrance).st_ino == os.stat(OWN).st_ino:
                raise OSError("the container has no network of its own")
            check(libc.setns(entrance, CLONE_NEWNET))
        finally:
            os.close(entrance)
