"""The worker's side of the namespaces of one environment: it has them made, and made anew where a program inside has ended them.

| state  | meaning                                            | next                                                                   |
|--------|----------------------------------------------------|------------------------------------------------------------------------|
| absent | nothing has needed the namespaces yet              | a session or a file call: stands                                       |
| stands | the three processes of the anchor live             | one of them ends, and with it all that is inside: ended; `end`: ended  |
| ended  | no process of the environment is left              | a session or a file call: stands, with the same files                  |
"""

from __future__ import annotations

import itertools
import resource
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

from workers.cpu import control_files
from workers.cpu.errors import FilesUnreachable, SessionUnavailable
from workers.cpu.files import root_of
from workers.cpu.handover.fork_client import ForkClient, close
from workers.cpu.ports.network import Network
from workers.cpu.process import tree
from workers.cpu.process.groups import Groups
from workers.cpu.process.namespace import READY

START_LIMIT_S, END_LIMIT_S = 60.0, 15.0


class Anchor(Network):
    """The namespaces of an environment, which the fork server is `asked` to make. Sockets in them come from there, too.

    To enter them, a process must first join the user namespace that they belong to, which no process with several threads can do.
    Programs of the worker's own user can trace its init and pause. So both are held to the limits and control groups of the programs.
    """

    def __init__(self, fork_client: ForkClient, asked: Mapping[str, object], groups: Groups, limits: Mapping[str, int]) -> None:
        self._fork_client, self._asked = fork_client, asked
        self._groups, self._limits = groups, limits
        self._lock = threading.Lock()
        self._channel: socket.socket | None = None
        self._processes: tuple[tree.Process, ...] = ()

    @property
    def stands(self) -> bool:
        """Whether its three processes live."""
        now = [tree.read_process(process.pid) for process in self._processes]
        living = [process.identity for process in now if process is not None and not process.is_dying]
        return len(living) == 3 and living == [process.identity for process in self._processes]

    def adopt(self, channel: socket.socket, pid: int) -> None:
        """Go on with namespaces that the worker before this one has had made, by the first of their processes."""
        line = [tree.read_process(pid)]
        for inner in (1, 2):
            # The init also has children that were orphaned inside, all of which are younger than the pause.
            below = [process for process in map(tree.read_process, tree.children(pid)) if process is not None]
            line.append(min((one for one in below if tree.inner_pid(one.pid) == inner), key=lambda one: one.start, default=None))
            pid = line[-1].pid if line[-1] is not None else 0
        with self._lock:
            self._channel, self._processes = channel, tuple(process for process in line if process is not None)

    def pids(self) -> tuple[int, ...]:
        """Return the ids of its three processes, which are started where they do not stand. Raises `SessionUnavailable`."""
        with self._lock:
            if not self.stands:
                self._end()
                self._start()
            return tuple(process.pid for process in self._processes)

    def _start(self) -> None:
        self._channel, pid = self._fork_client.anchor({**self._asked, "groups": self._groups.prefixes})
        bwrap = tree.read_process(pid)
        self._processes = (bwrap,) if bwrap is not None else ()
        said = self._said(self._channel)
        if bwrap is not None:
            self._processes = (bwrap, *tree.descendants(pid))
            try:
                self._bound(pid, [process.pid for process in self._processes[1:]])
            except OSError as error:
                said += f"\nits processes cannot be bounded: {error.strerror}".encode()
        if not said.endswith(READY) or len(self._processes) != 3:
            self._end()
            lines = said.decode(errors="replace").strip().splitlines()
            reason = lines[-1] if lines and not said.endswith(READY) else "what holds its namespaces ends as soon as it stands"
            raise SessionUnavailable(f"cannot set the shell apart from the host: {reason}")

    def _bound(self, first: int, inside: Sequence[int]) -> None:
        """Hold the processes inside to the limits and groups of a session. Raises `OSError`."""
        self._groups.make(first)
        for folder, pid in itertools.product(self._groups.joined(first), inside):
            control_files.write(f"{folder}/cgroup.procs", str(pid))
        for name, pid in itertools.product(self._limits, inside):
            kind, wanted = getattr(resource, name), self._limits[name]
            _, most = resource.prlimit(pid, kind)
            value = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
            resource.prlimit(pid, kind, (value, value))

    def _said(self, channel: socket.socket) -> bytes:
        """Return what is said until the namespaces are ready, or have ended."""
        deadline, said = time.monotonic() + START_LIMIT_S, b""
        try:
            while not said.endswith(READY):
                channel.settimeout(max(0.001, deadline - time.monotonic()))
                if not (chunk := channel.recv(4096)):
                    break
                said += chunk
        except TimeoutError:
            return f"its namespaces were not ready within {START_LIMIT_S:g} s".encode()
        except ConnectionError:
            pass
        return said

    def root(self) -> AbstractContextManager[int]:
        """Give a descriptor of the root folder inside. Raises `FilesUnreachable`."""
        try:
            pause = self.pids()[-1]
        except (OSError, SessionUnavailable) as error:
            raise FilesUnreachable(f"the environment's files cannot be reached: {error}") from error
        return root_of(pause, lambda: not self.stands)

    def make_sockets(self) -> list[socket.socket]:
        return self._fork_client.sockets_inside(self.pids())

    def end(self) -> None:
        """Have the kernel end everything inside, and return once that is done."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        for process in self._processes[:2]:
            tree.send(process, signal.SIGKILL)
        for process in self._processes[:2]:
            # The end of a socket of theirs comes before they leave their groups.
            tree.await_end(process, END_LIMIT_S)
        if self._channel is not None:
            close(self._channel)
        for process in self._processes[:1]:
            self._groups.remove_of(process.pid)
        self._channel, self._processes = None, ()
