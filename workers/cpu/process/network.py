"""The network of a session that bubblewrap sets apart: sockets in it come from the sandbox's fork server.

To enter it, a process must first join the user namespace that the network belongs to, which no process with several threads can do.
"""

from __future__ import annotations

import socket

from workers.cpu.ports.network import Network
from workers.cpu.process import tree
from workers.cpu.process.fork_client import ForkClient
from workers.cpu.process.members import Members


class SessionNetwork(Network):
    """The loopback of a session with the anchor of `members`, whose supervisor is the process `supervisor`."""

    def __init__(self, fork_client: ForkClient, members: Members, supervisor: tree.Process) -> None:
        self._fork_client, self._members, self._supervisor = fork_client, members, supervisor

    def make_sockets(self) -> list[socket.socket]:
        """Return sockets; see the base class. Where nothing but the shell is in the session, nothing listens, and none are made."""
        if not any(process.pid != self._members.shell for process in self._members.settled()[0]):
            return []
        return self._fork_client.sockets_inside(self._members.anchor, self._supervisor.identity)
