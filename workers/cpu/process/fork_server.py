"""The process that forks supervisors: one for a sandbox.

Run as `python -m workers.cpu.process.fork_server [<descriptor>…]`, with a SOCK_SEQPACKET socket of Unix as standard input, and
descriptors that this process and the supervisors hold while they live, but no command does.

    worker ── fork server ── supervisor (one a session) ── shell ── the commands

A worker is full of threads, so it cannot fork with set-up code. A fork server has one thread and has imported what a supervisor
needs, so a supervisor costs a fork. Each request is a message with a socket, and is answered by the id of the process that was forked:

| message                                       | the forked process                                                                |
|-----------------------------------------------|-----------------------------------------------------------------------------------|
| `supervisor`                                  | is a supervisor, which serves the socket                                          |
| `{"anchor", "supervisor"}`, as JSON           | enters the network of a session, makes sockets there, sends these, and ends       |

Of the socket of a supervisor the fork server keeps a copy. It closes that once nothing of the session is left, so the end of the socket
means just that, however the supervisor ended.

| state of a supervisor | meaning                                              | next                                                |
|-----------------------|------------------------------------------------------|-----------------------------------------------------|
| running               | it serves its socket, see `supervisor.py`            | the worker closes its end, or it is killed: ended   |
| ended                 | it has been reaped; what it left is killed           | no orphan is left: the socket is closed             |

A supervisor that was killed leaves its processes to the fork server, which is a child subreaper. The worker gets the event `killed`, so
that it brings them to the foreground, where they can die. When the worker dies, the fork server waits for its supervisors.

Rules: the standard library only, one thread, no code of a command ever runs in this process.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import sys
import time
from typing import Any, NoReturn

from workers.cpu.ports.loopback import make_sockets
from workers.cpu.process import tree
from workers.cpu.process.members import Members, kill
from workers.cpu.process.namespace import enter_network
from workers.cpu.process.serving import PR_SET_CHILD_SUBREAPER, Wakeup, prctl, serve
from workers.cpu.process.supervisor import CLOSE_GRACE_S, Supervisor

SHUTDOWN_LIMIT_S, RETRY_S = 4.0, 0.005
SUPERVISOR = b"supervisor"
REQUEST_BYTES = 512
MADE = b"made"
"""What is sent with sockets that were made; else why there are none."""

ANSWER_BYTES = 32
"""The answer to a request is the id of the forked process, in decimal digits; 0 where none could be forked."""


class ForkServer:
    """Forks supervisors on request, reaps them, and kills what they left."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.wakeup = Wakeup()
        self.running: dict[int, socket.socket] = {}
        self.entering: set[int] = set()
        self.ended: list[socket.socket] = []
        prctl(PR_SET_CHILD_SUBREAPER, 1)

    def serve(self) -> None:
        """Answer until the worker closes its end, then wait for the supervisors to leave and kill what is left."""
        serve(self.channel, self.wakeup, self.reap, self.answer)
        deadline = time.monotonic() + SHUTDOWN_LIMIT_S
        while self.running and (left_s := deadline - time.monotonic()) > 0:
            # They see the end of their sockets too. One that is killed instead would leave its control group.
            self.wakeup.wait(left_s)
            self.reap()
        kill(Members(os.getpid()), set(), 2 * CLOSE_GRACE_S, self.wakeup, self.reap)

    def answer(self) -> bool:
        """Fork what is asked for; return False at the end of file. Failing to fork is seen as the end of the socket."""
        try:
            message, descriptors, _, _ = socket.recv_fds(self.channel, REQUEST_BYTES, 1)
        except ConnectionError:
            return False
        if not message:
            return False
        # A descriptor that came over a socket would otherwise be inherited by the shells.
        os.set_inheritable(descriptors[0], False)
        theirs = socket.socket(fileno=descriptors[0])
        try:
            pid = os.fork()
        except OSError:
            pid = 0
            theirs.close()
        else:
            if message == SUPERVISOR:
                if pid == 0:
                    self.become_supervisor(theirs)
                self.running[pid] = theirs
            else:
                if pid == 0:
                    self.make_sockets(json.loads(message), theirs)
                self.entering.add(pid)
                theirs.close()
        with contextlib.suppress(OSError):  # the worker may be gone
            self.channel.send(str(pid).encode(), socket.MSG_DONTWAIT)
        return True

    def become_supervisor(self, channel: socket.socket) -> None:
        """Serve a session in this freshly forked process, which must not keep the sockets of others open."""
        try:
            self.wakeup.close()
            for other in (self.channel, *self.running.values(), *self.ended):
                other.close()
            Supervisor(channel).serve()
        finally:
            os._exit(0)

    def make_sockets(self, asked: dict[str, Any], channel: socket.socket) -> NoReturn:
        """Send sockets of the network of a session, in this freshly forked process, which then ends."""

        def stands() -> bool:
            bwrap, init, pause = map(tree.read_process, asked["anchor"])
            owner = tree.read_process(asked["supervisor"][0])
            if bwrap is None or init is None or pause is None or owner is None:
                return False
            line = [pause.parent, init.parent, bwrap.parent, owner.parent]
            return line == [init.pid, bwrap.pid, owner.pid, os.getppid()] and list(owner.identity) == asked["supervisor"]

        try:
            self.wakeup.close()
            enter_network(asked["anchor"][-1], stands)
            made = make_sockets()
            socket.send_fds(channel, [MADE], [each.fileno() for each in made])
        except OSError as error:
            channel.send(str(error).encode())
        finally:
            os._exit(0)

    def reap(self) -> float | None:
        """Collect what has ended. Return the seconds until orphans are to be killed once more, None where there are none."""
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                self.entering.discard(found[0])
                if (channel := self.running.pop(found[0], None)) is not None:
                    self.ended.append(channel)
                    if os.WIFSIGNALED(found[1]):
                        with contextlib.suppress(OSError):
                            channel.send(json.dumps({"event": "killed"}).encode(), socket.MSG_DONTWAIT)
        if not self.ended:
            return None
        own = self.running.keys() | self.entering
        spared = {process.identity for process in map(tree.read_process, own) if process is not None}
        for process in tree.settled(os.getpid(), spared)[0]:
            tree.send(process, signal.SIGKILL)
        # Whatever is below an orphan becomes a child of this process when the orphan has ended.
        if not set(tree.children(os.getpid())) <= own:
            return RETRY_S
        for channel in self.ended:
            channel.close()
        self.ended.clear()
        return None


def main() -> None:
    """Serve the socket on standard input until the worker closes it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for descriptor in map(int, sys.argv[1:]):
        os.set_inheritable(descriptor, False)
    channel = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC), 0)
    # Without a collector, forked supervisors go on sharing this process's memory.
    gc.collect()
    gc.freeze()
    gc.disable()
    ForkServer(channel).serve()


if __name__ == "__main__":
    main()
