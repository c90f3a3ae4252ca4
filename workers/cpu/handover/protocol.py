"""Environments outlive a worker that is killed or hands over: who holds what of them meanwhile, and how the next worker adopts them.

A supervisor ends when its connection to the worker ends. So does what holds the namespaces, and so does a container. A program that prints
ends when nobody reads its output any more. All these need an open end in a living process. The fork server outlives the worker, and has
copies of the worker's ends. With a container its processes end, so where the worker is one, the fork server is in another (`keeper.py`). A
copy is made once a session, never for a command:

| name              | what is kept of a session                                                                       |
|-------------------|-------------------------------------------------------------------------------------------------|
| (a socket)        | the connection to its supervisor: what that says meanwhile waits there                          |
| `out`, `err`      | the reading ends of its streams: a command that prints more than they hold waits                |
| `done`            | the FIFO of reports: the report of a command that ends meanwhile waits there                    |
| `memory`, `errors`| what its command has printed so far, and how that stands; see `shell/run_memory.py`             |
| (none)            | a stream to which something left running still writes                                           |
| `alive`           | of a container in the place of a supervisor: while it is open, the container stands             |

| state      | who holds the ends                 | what ends it                                            | next                        |
|------------|------------------------------------|---------------------------------------------------------|-----------------------------|
| running    | the worker, and the fork server    | the worker says that it closes: all is ended            | ended                       |
|            |                                    | its connection ends unsaid: a kill, crash, hand-over    | worker gone                 |
| worker gone| the fork server                    | a successor connects: it is handed the copies           | adopted                     |
|            |                                    | `keep_s` are over; `tangram up` ends (`end_kept`)       | ended                       |
| adopted    | the successor, and the fork server | as while running; what the successor leaves is ended    | running                     |
| ended      | nobody                             | supervisors see the end of their sockets, and kill;     |                             |
|            |                                    | containers, which go on if paused, see that of `alive`  |                             |

A death is noticed by the end of a connection, on both sides, at once. These bound each wait:

| who waits      | for what                                              | how long                                          |
|----------------|-------------------------------------------------------|---------------------------------------------------|
| fork server    | a successor                                           | `keep_s`, which is TANGRAM_NODE_LOST_S            |
| fork server    | that a successor takes what it is handed              | `HAND_OVER_S`                                     |
| successor      | that it is handed everything                          | `HAND_OVER_S`                                     |
| successor      | that shells wait for more whose memory was not kept   | `adoption.END_S`, for all of them together        |
| scheduler      | a beat of the node                                    | TANGRAM_NODE_LOST_S; until then the node is silent|

*Fences.* A successor holds the lock of the sandbox's folder, so it is alone. The socket is in that folder, which only the worker's user
may enter. Environments that are set apart do not see it. The fork server takes only a process of its own user that is not below itself,
where all programs of environments are. The fork server may be of another release. One that speaks another `VERSION` says so, and ends
everything. It also forks supervisors and anchors as its release does. So whoever changes a message to one of these counts `VERSION` up,
unless an older process passes the change over.

A successor takes an environment only if the worker before set it up as the successor would. So an upgrade that changes the set-up ends
environments. A worker that begins to close an environment removes its record first. A fork server that is killed loses its copies. Of
containers the worker sends them again to the next one, at the next open or before it hands over. Environments of processes end with it,
so the worker removes their records.

A successor goes on with a command that runs, or has ended meanwhile, if its memory has the message of its action (`workers/resumed.py`). A
command with a terminal or an input has none: what was typed and not read is lost with the worker. It is ended, and its environment stays.

Rules: the standard library only; the fork server imports this file.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.local.kept_environments import SOCKET, address, connect
from workers.cpu.control_files import thaw
from workers.cpu.process import tree

VERSION = 2
HAND_OVER_S = 15.0
MESSAGE_BYTES = 4096
MOST_KEPT = 8
"""Descriptors of a session, at most."""
STREAMS = ("out", "err")
"""The reading ends of the FIFOs of a session, by name."""


@dataclass(slots=True)
class End:
    """The worker's end of something in an environment: of its anchor, a supervisor, or a descriptor of a session.

    `pid` is the process at the other end, 0 for a descriptor. `control` is the name of the session's protocol folder. A descriptor has a
    `name`; without one it is a stream that something left running writes to.
    """

    environment: str
    channel: socket.socket | int
    pid: int = 0
    control: str = ""
    name: str = ""

    def fileno(self) -> int:
        """Return its descriptor."""
        return self.channel if isinstance(self.channel, int) else self.channel.fileno()

    def is_among(self, kept: Mapping[str, End]) -> bool:
        """Return whether its file is kept already, by the same name."""
        return self.name in kept and os.path.sameopenfile(self.fileno(), kept[self.name].fileno())

    def close(self) -> None:
        """Give the descriptor back. Again: nothing."""
        if not isinstance(self.channel, int):
            self.channel.close()
        elif self.channel >= 0:
            descriptor, self.channel = self.channel, -1
            os.close(descriptor)


@dataclass(slots=True)
class Kept:
    """What a successor is handed: the connection to the fork server, which is process `server`, the lock of cleanup, and the ends."""

    channel: socket.socket
    server: int = 0
    lock: int = -1
    ends: list[End] = field(default_factory=list)


@dataclass(slots=True)
class KeptOfContainers:
    """What the fork server keeps of containers, by protocol folder: ends by name, and the file and value that let go on what is paused."""

    ends: dict[str, dict[str, End]] = field(default_factory=dict)
    thawing: dict[str, tuple[str, str]] = field(default_factory=dict)

    def all(self) -> list[End]:
        """Return the ends of all containers."""
        return [end for kept in self.ends.values() for end in kept.values()]

    def keeping(self, asked: Mapping[str, Any]) -> dict[str, End] | None:
        """Return what is kept of a protocol folder, to be added to; None where the worker names no descriptor, so that all is let go."""
        control = asked["control"]
        if asked["names"]:
            if asked.get("thawing"):
                self.thawing[control] = asked["thawing"]
            return self.ends.setdefault(control, {})
        if control in self.thawing:
            thaw("", [self.thawing.pop(control)])
        for end in self.ends.pop(control, {}).values():
            end.close()
        return None


def ends_of(asked: Mapping[str, Any], descriptors: Sequence[int]) -> list[End]:
    """Return the descriptors of a session that the worker wants to be kept."""
    names = zip(asked["names"], descriptors, strict=False)  # there may have been no room for some
    return [End(asked["keep"], descriptor, 0, asked["control"], name) for name, descriptor in names]


def written_to(ends: Iterable[End]) -> list[End]:
    """Return those ends of streams to which something may still write. All others are closed."""
    streams, poller = [], select.poll()
    for end in ends:
        if end.name in ("", *STREAMS):
            end.control = end.name = ""
            poller.register(end, 0)
            streams.append(end)
        else:
            end.close()
    over = {descriptor for descriptor, _ in poller.poll(0)}
    for end in (gone := [end for end in streams if end.fileno() in over]):
        end.close()
    return [end for end in streams if end not in gone]


def listen(base: Path) -> socket.socket:
    """Return a socket for successors in the folder `base`, in the place of an earlier one. Raises `OSError`."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with address(base) as path:
            (base / SOCKET).unlink(missing_ok=True)
            listener.bind(path)
            (base / SOCKET).chmod(0o600)
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def welcome(listener: socket.socket) -> tuple[socket.socket, object] | None:
    """Take one connection; return it and what it asks for. None where it is gone already, or nobody who may ask."""
    channel, _ = listener.accept()
    channel.settimeout(HAND_OVER_S)
    pid, user, _ = struct.unpack("3i", channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    try:
        if user == os.geteuid() and not _is_below(pid):
            asked, poller = json.loads(channel.recv(MESSAGE_BYTES)), select.poll()
            poller.register(channel, 0)
            if not poller.poll(0):
                return channel, asked
    except (OSError, ValueError):
        pass
    channel.close()
    return None


def _is_below(pid: int) -> bool:
    """Return whether a process is below this one, or there is no telling: one of another PID namespace has the id 0."""
    if pid <= 0:
        return True
    while pid > 1:
        process = tree.read_process(pid)
        if process is None or pid == os.getpid():
            return True
        pid = process.parent
    return False


def hand_over(channel: socket.socket, ends: Iterable[End], lock: int) -> None:
    """Send a successor everything. Raises `OSError`."""
    for end in ends:
        message = {"environment": end.environment, "pid": end.pid, "control": end.control, "name": end.name}
        message["is_socket"] = not isinstance(end.channel, int)
        socket.send_fds(channel, [json.dumps(message).encode()], [end.fileno()])
    socket.send_fds(channel, [json.dumps({"server": os.getpid()}).encode()], [lock])


def take_over(base: Path, keep_s: float, warn: Callable[[str], object]) -> Kept | None:
    """Return what the worker before this one has left in the folder `base`, whose lock the caller has; None where that is nothing.

    `warn` is told if there is something of another version.
    """
    channel = connect(base)
    if channel is None:
        return None
    channel.settimeout(HAND_OVER_S)
    kept = Kept(channel)
    try:
        channel.send(json.dumps({"adopt": VERSION, "keep_s": float(keep_s)}).encode())
        while kept.lock < 0:
            message, descriptors, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, 1)
            if not descriptors:
                if not message:
                    raise ConnectionError
                spoken = json.loads(message)["speaks"]
                warn(f"what the worker before this one has left was kept in version {spoken}, and this release adopts {VERSION}")
                continue
            os.set_inheritable(descriptors[0], False)
            said = json.loads(message)
            if "server" in said:
                kept.server, kept.lock = int(said["server"]), descriptors[0]
            elif said.pop("is_socket"):
                kept.ends.append(End(channel=socket.socket(fileno=descriptors[0]), **said))
            else:
                kept.ends.append(End(channel=descriptors[0], **said))
    except (OSError, ValueError):
        for end in kept.ends:
            end.close()
        channel.close()
        return None
    channel.settimeout(None)
    return kept
