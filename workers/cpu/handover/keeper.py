"""A fork server in a container of its own: it keeps what outlives a worker that is a container itself.

Run as `python -m workers.cpu.handover.keeper <keep_s> <base>`, among the processes of the host; `docker/keeper_container.py` starts it.
With a container, the engine ends all processes in it. So what keeps environments of a worker is in a container beside the worker's.

It begins as a fork server whose worker has gone. So the first worker comes over the socket in `base`, as each successor does. It takes
the lock of cleanup itself. SIGTERM, by which an engine stops a container, has it end what it keeps.

Rules: the standard library only, one thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import sys
from pathlib import Path

from workers.cpu.handover.fork_server import ForkServer
from workers.cpu.handover.protocol import listen


class Keeper(ForkServer):
    """A fork server that a signal can end."""

    def end(self) -> None:
        """Wait for no worker any more."""
        self.is_told_to_end = True
        for each in filter(None, (self.channel, self.listener)):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def meet(self) -> bool:
        return not self.is_told_to_end and super().meet()


def main() -> None:
    """Keep what workers in a folder leave, until none comes any more."""
    keep_s, base = float(sys.argv[1]), Path(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listener = listen(base)  # First: a worker that finds the lock taken and nobody to talk to gives up.
    lock = os.open(base / "cleanup", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    channel, gone = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    gone.close()
    keeper = Keeper(channel, keep_s, listener, lock, "")
    signal.signal(signal.SIGTERM, lambda *_: keeper.end())
    keeper.serve()


if __name__ == "__main__":
    main()
