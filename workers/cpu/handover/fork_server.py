"""The process that forks supervisors: one for a sandbox.

Run as `python -m workers.cpu.handover.fork_server <keep_s> <listener> <lock> <freezer>`, with a SOCK_SEQPACKET socket of Unix as standard
input. The descriptor `lock` is held by this process and the supervisors while they live, but by no command. On `listener` comes the next
worker, within `keep_s` seconds after this one has died; with 0 there is none, see `protocol.py`. Where there is no such descriptor, it is
-1. The freezers of environments begin with `freezer`, which may be empty.

    worker ── fork server ── supervisor (one a session) ── shell ── the commands

A worker is full of threads, so it cannot fork with set-up code. A fork server has one thread and has imported what a supervisor
needs, so a supervisor costs a fork. Each request is a message with both ends of a socket. Over the one, the forked process first says its
id. Where it cannot be forked, that is 0, and why. The other is the worker's, of which copies are kept of supervisors and anchors:

| message, as JSON                     | the forked process                                                                   |
|--------------------------------------|--------------------------------------------------------------------------------------|
| `{"supervisor": anchor, "groups": …}` | is a supervisor, which serves the socket; inside of the anchor if one is named      |
| `{"anchor": [program, argument, …]…}` | is bwrap, the anchor of an environment's namespaces; see `process/namespace.py`     |
| `{"view": steps, …}`                 | is the holder of such namespaces without bubblewrap; see `process/view.py`           |
| `{"sockets": anchor}`                | enters the network of an environment, makes sockets there, sends these, and ends     |
| `{"keep": environment, "control": …}`| none: with descriptors of a session, by name, which outlive the worker. Those of a   |
|                                      | container have no supervisor to go with: they are kept until none are named          |
| `{"end": true}`                      | none: the worker closes, and all is ended                                            |

An anchor is named by the ids of its three processes. Of the socket of a supervisor the fork server keeps a copy. It closes that once
nothing of the session is left, so the end of the socket means just that, however the supervisor ended. It then removes the control
groups of the session, whose names are `groups` followed by the id of the supervisor.

| state of a supervisor | meaning                                              | next                                                |
|-----------------------|------------------------------------------------------|-----------------------------------------------------|
| running               | it serves its socket, see `process/supervisor.py`    | the worker closes its end, or it is killed: ended   |
| ended                 | it has been reaped; what it left is killed           | nothing is left: the socket is closed               |

A supervisor that was killed leaves its processes to the fork server, which is a child subreaper. The worker gets the event `killed`, so
that it brings them to the foreground, where they can die. Inside of an anchor they are left to its init instead, which nobody can
tell from those of other sessions. So there the whole anchor ends. At its end, the fork server waits for its supervisors.

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
from dataclasses import dataclass, field
from typing import Any, NoReturn

from workers.cpu.control_files import is_removed, thaw
from workers.cpu.handover.protocol import MOST_KEPT, VERSION, End, KeptOfContainers, ends_of, hand_over, welcome, written_to
from workers.cpu.ports.loopback import make_sockets
from workers.cpu.process import seccomp, tree
from workers.cpu.process.members import Members, kill
from workers.cpu.process.namespace import become_bwrap, enter, enter_network
from workers.cpu.process.socket_server import PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, Wakeup, end_first, prctl, rename, serve
from workers.cpu.process.supervisor import CLOSE_GRACE_S, Supervisor
from workers.cpu.process.view import become_holder

SHUTDOWN_LIMIT_S, RETRY_S = 4.0, 0.005
REQUEST_BYTES = 1 << 16
MADE = b"made"
"""What is sent with sockets that were made; else why there are none."""


@dataclass(slots=True)
class Session:
    """What the fork server knows of a session: both ends of its socket, its anchor and control groups, and what it keeps by name."""

    channel: socket.socket
    end: End
    anchor: list[int]
    groups: list[str]
    was_killed: bool = False
    kept: dict[str, End] = field(default_factory=dict)

    def close(self) -> None:
        """Close the copies of both ends, and what is kept."""
        self.channel.close()
        for end in (self.end, *self.kept.values()):
            end.close()


class ForkServer:
    """Forks supervisors on request, reaps them, and kills what they left."""

    def __init__(self, channel: socket.socket, keep_s: float, listener: socket.socket | None, lock: int, freezer: str) -> None:
        self.channel, self.keep_s, self.listener, self.lock, self.freezer = channel, keep_s, listener, lock, freezer
        self.is_told_to_end = False
        self.wakeup = Wakeup()
        self.running: dict[int, Session] = {}
        self.anchors: dict[int, End] = {}
        self.streams: list[End] = []
        self.containers = KeptOfContainers()
        self.anchor_groups: dict[int, list[str]] = {}
        self.left_groups: list[str] = []
        self.entering: set[int] = set()
        self.messengers: dict[int, tuple[int, Session]] = {}
        self.ended: list[Session] = []
        prctl(PR_SET_CHILD_SUBREAPER, 1)

    def serve(self) -> None:
        """Answer until no worker comes any more, then wait for the supervisors to leave and kill what is left."""
        serve(self.channel, self.wakeup, self.reap, self.answer)
        while not self.is_told_to_end and self.has_successor():
            serve(self.channel, self.wakeup, self.reap, self.answer)
        thaw(self.freezer, self.containers.thawing.values())  # What is frozen cannot end.
        for end in self.kept():
            end.close()
        deadline = time.monotonic() + SHUTDOWN_LIMIT_S
        while self.running and (left_s := deadline - time.monotonic()) > 0:
            # They see the end of their sockets too.
            self.wakeup.wait(left_s)
            self.reap()
        kill(Members(os.getpid()), set(), 2 * CLOSE_GRACE_S, self.wakeup, self.reap)
        # Now they are empty, and removed. The kernel may take a moment to see that.
        deadline = time.monotonic() + SHUTDOWN_LIMIT_S
        while not thaw(self.freezer) and time.monotonic() < deadline:
            time.sleep(RETRY_S)

    def has_successor(self) -> bool:
        """Wait for the next worker, now that this one has died; return whether one is there."""
        self.channel.close()
        deadline = time.monotonic() + SHUTDOWN_LIMIT_S
        while self.messengers and (left_s := deadline - time.monotonic()) > 0:
            # A supervisor that is being forked is to be handed over, too.
            self.wakeup.wait(left_s)
            self.reap()
        if self.listener is not None:
            serve(self.listener, self.wakeup, self.reap, self.meet, time.monotonic() + self.keep_s)
        return self.channel.fileno() >= 0 and not self.is_told_to_end

    def meet(self) -> bool:
        """Take a connection: of the next worker, which is handed everything, or of who ends it all. Return False once that is done."""
        assert self.listener is not None
        if (guest := welcome(self.listener)) is None:
            return True
        channel, asked = guest
        match asked:
            case {"adopt": int(version), "keep_s": float(keep_s)} if version == VERSION:
                try:
                    hand_over(channel, self.kept(), self.lock)
                except OSError:
                    channel.close()
                    return True
                channel.settimeout(None)
                self.channel, self.keep_s = channel, keep_s
            case _:
                if isinstance(asked, dict) and "adopt" in asked:
                    with contextlib.suppress(OSError):
                        channel.send(json.dumps({"speaks": VERSION}).encode())
                # The socket ends with this process, which says that all has ended.
                self.channel, self.is_told_to_end = channel, True
        return False

    def kept(self) -> list[End]:
        """Return the worker's ends of what stands."""
        sessions = [end for session in self.running.values() for end in (session.end, *session.kept.values())]
        return [*self.anchors.values(), *sessions, *self.containers.all(), *self.streams]

    def answer(self) -> bool:
        """Do what is asked; return False when the worker has gone."""
        try:
            message, descriptors, _, _ = socket.recv_fds(self.channel, REQUEST_BYTES, MOST_KEPT)
        except ConnectionError:
            return False
        if not message:
            return False
        for descriptor in descriptors:
            # One that came over a socket would otherwise be inherited by the shells.
            os.set_inheritable(descriptor, False)
        asked = json.loads(message)
        self.is_told_to_end |= "end" in asked
        if "keep" in asked:
            self.keep(asked, descriptors)
        elif len(descriptors) == 2:
            self.fork_for(asked, *map(_socket, descriptors))
        else:
            # There was no room for more. Whoever asks sees the end of the socket.
            for descriptor in descriptors:
                os.close(descriptor)
        return not self.is_told_to_end

    def keep(self, asked: dict[str, Any], descriptors: list[int]) -> None:
        """Keep descriptors of a session, unless they are kept. A stream that they replace is kept as long as something writes to it."""
        ends = ends_of(asked, descriptors)
        if asked.get("in_container"):
            kept = self.containers.keeping(asked)
        else:
            beginning = (session for _, session in self.messengers.values())
            kept = next((one.kept for one in (*self.running.values(), *beginning) if one.end.control == asked["control"]), None)
        fresh = {} if kept is None else {end.name: end for end in ends if not end.is_among(kept)}
        for end in ends:
            if fresh.get(end.name) is not end:
                end.close()
        if kept is not None:
            self.streams = written_to([*self.streams, *(kept[name] for name in fresh if name in kept)])
            kept |= fresh

    def fork_for(self, asked: dict[str, Any], theirs: socket.socket, ours: socket.socket) -> None:
        """Fork what is asked for, or say why that cannot be."""
        end, kept = End(asked.get("of", ""), ours, control=asked.get("control", "")), False
        try:
            kept = self.fork(asked, theirs, end)
        except OSError as error:
            say(theirs, 0, f"cannot fork: {error.strerror}")
        if not kept or "supervisor" not in asked:
            theirs.close()
        if not kept:
            end.close()

    def fork(self, asked: dict[str, Any], theirs: socket.socket, end: End) -> bool:
        """Fork what is asked for. Return whether the worker's end is kept. Raises `OSError`."""
        match asked:
            case {"anchor": [program, *arguments], "user": int(user)}:
                if (pid := os.fork()) == 0:
                    say(theirs, os.getpid())
                    end_first()
                    become_bwrap(program, arguments, user, theirs.fileno())
                self.note_anchor(pid, asked["groups"], end)
            case {"view": list(steps), "host_name": str(host_name), "user": int(user)}:
                if (pid := os.fork()) == 0:
                    say(theirs, os.getpid())
                    rename("init")
                    end_first()
                    become_holder(steps, host_name, user, theirs.fileno())
                self.note_anchor(pid, asked["groups"], end)
            case {"sockets": list(anchor)}:
                if (pid := os.fork()) == 0:
                    self.make_sockets(anchor, theirs)
                self.entering.add(pid)
            case {"supervisor": [], "groups": list(prefixes)}:
                if (pid := os.fork()) == 0:
                    say(theirs, os.getpid())
                    self.become_supervisor(theirs, end)
                end.pid = pid
                self.running[pid] = Session(theirs, end, [], [f"{prefix}-{pid}" for prefix in prefixes])
            case {"supervisor": list(anchor), "groups": list(prefixes)}:
                self.fork_messenger(Session(theirs, end, anchor, prefixes))
        return "sockets" not in asked

    def note_anchor(self, pid: int, prefixes: list[str], end: End) -> None:
        """Take note of an anchor by its first process. Its groups go with it, also where the worker has been killed."""
        end.pid = pid
        self.anchors[pid] = end
        self.anchor_groups[pid] = [f"{prefix}-{pid}" for prefix in prefixes]

    def fork_messenger(self, session: Session) -> None:
        """Fork a process that enters an anchor, forks a supervisor there, says its id, and ends. Raises `OSError`."""
        reading, writing = os.pipe2(os.O_CLOEXEC)
        try:
            messenger = os.fork()
        except OSError:
            os.close(reading)
            os.close(writing)
            raise
        if messenger == 0:
            pid, reason = 0, ""
            try:
                rename("supervisor")
                end_first()  # Inside, it may no more.
                enter(session.anchor[-1], lambda: self.stands(session.anchor))
                prctl(PR_SET_NO_NEW_PRIVS, 1)
                seccomp.install(seccomp.FILTER or b"")
                pid = os.fork()
                if pid == 0:
                    os.close(reading)
                    os.close(writing)
                    self.become_supervisor(session.channel, session.end)
            except OSError as error:
                reason = f"cannot set the shell apart from the host: {error}"
            finally:
                os.write(writing, str(pid).encode())
                say(session.channel, pid, reason)
                os._exit(0)
        os.close(writing)
        self.messengers[messenger] = (reading, session)

    def take_over(self, reading: int, session: Session) -> None:
        """Take on the supervisor that a messenger has forked, by the id that it wrote. The messenger has ended."""
        with open(reading, "rb") as file:
            pid = int(file.read() or 0)
        session.groups = [f"{prefix}-{pid}" for prefix in session.groups]
        try:
            if pid:
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            pid = 0  # it has been reaped already
        session.end.pid = pid
        if pid:
            self.running[pid] = session
        else:
            self.ended.append(session)

    def stands(self, anchor: list[int]) -> bool:
        """Return whether the processes of an anchor live. Asked in a child, while the first one cannot be reaped."""
        bwrap, init, pause = map(tree.read_process, anchor)
        if bwrap is None or init is None or pause is None or bwrap.pid not in self.anchors:
            return False
        line = [pause.parent, init.parent, bwrap.parent]
        return line == [init.pid, bwrap.pid, os.getppid()] and not (init.is_dying or pause.is_dying)

    def become_supervisor(self, channel: socket.socket, own: End) -> NoReturn:
        """Serve a session in this freshly forked process, which must keep neither the worker's `own` end open nor the sockets of others."""
        try:
            self.wakeup.close()
            for session in (*self.running.values(), *self.ended, *(session for _, session in self.messengers.values())):
                session.close()
            for reading, _ in self.messengers.values():
                os.close(reading)
            for end in (own, *self.anchors.values(), *self.streams):
                end.close()
            for each in filter(None, (self.channel, self.listener)):
                each.close()
            Supervisor(channel).serve()
            os._exit(0)
        finally:
            # What is inside can lower its limits until it fails, which is as good as killing it.
            os._exit(1)

    def make_sockets(self, anchor: list[int], channel: socket.socket) -> NoReturn:
        """Send sockets of the network of an environment, in this freshly forked process, which then ends."""
        try:
            say(channel, os.getpid())
            self.wakeup.close()
            enter_network(anchor[-1], lambda: self.stands(anchor))
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
                if (anchor := self.anchors.pop(found[0], None)) is not None:
                    anchor.close()
                if (messenger := self.messengers.pop(found[0], None)) is not None:
                    self.take_over(*messenger)
                if (session := self.running.pop(found[0], None)) is not None:
                    session.was_killed = found[1] != 0
                    if session.was_killed:
                        self.note_killed(session)
                    self.ended.append(session)
        for pid in self.anchor_groups.keys() - self.anchors.keys():
            # While its init ends, they are in use.
            if all([is_removed(folder) for folder in self.anchor_groups[pid]]):
                del self.anchor_groups[pid]
        self.left_groups = [folder for folder in self.left_groups if not is_removed(folder)]
        # What a supervisor inside of an anchor leaves does not come here.
        self.ended = [session for session in self.ended if not session.anchor or not self.is_over(session)]
        if all(session.anchor for session in self.ended):
            return None
        own = self.running.keys() | self.entering | self.anchors.keys()
        spared = {process.identity for process in map(tree.read_process, own) if process is not None}
        for process in tree.settled(os.getpid(), spared)[0]:
            tree.send(process, signal.SIGKILL)
        # Whatever is below an orphan becomes a child of this process when the orphan has ended.
        if not set(tree.children(os.getpid())) <= own:
            return RETRY_S
        self.ended = [session for session in self.ended if not self.is_over(session)]
        return None

    def is_over(self, session: Session) -> bool:
        """Say the end of a session of which nothing is left: remove its groups, and close its socket."""
        if session.was_killed and self.init_of(session.anchor) is not None:
            return False
        # What dies slowly in an anchor, for want of a core, may outlive its supervisor.
        self.left_groups += [folder for folder in session.groups if not is_removed(folder)]
        session.close()
        return True

    def note_killed(self, session: Session) -> None:
        """Tell the worker that a supervisor was killed, and end the anchor that it was in."""
        with contextlib.suppress(OSError):
            session.channel.send(json.dumps({"event": "killed"}).encode(), socket.MSG_DONTWAIT)
        if (init := self.init_of(session.anchor)) is not None:
            tree.send(init, signal.SIGKILL)

    def init_of(self, anchor: list[int]) -> tree.Process | None:
        """Return the init of an anchor, the last to end of all that is inside; None where there is no anchor, or it has ended."""
        init = tree.read_process(anchor[1]) if anchor else None
        # An init whose bwrap has ended is an orphan, and so a child of this process.
        return init if init is not None and init.parent in (anchor[0], os.getpid()) and init.state != "Z" else None


def say(channel: socket.socket, pid: int, reason: str = "") -> None:
    """Tell the worker the id of the process that was forked, or why there is none; it may be gone."""
    with contextlib.suppress(OSError):
        channel.send(f"{pid} {reason}".encode(), socket.MSG_DONTWAIT)


def _socket(descriptor: int) -> socket.socket:
    return socket.socket(fileno=descriptor)


def main() -> None:
    """Serve the socket on standard input, and those of the workers that follow."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    keep_s, listener, lock = float(sys.argv[1]), *map(int, sys.argv[2:4])
    for descriptor in filter(lambda each: each >= 0, (listener, lock)):
        os.set_inheritable(descriptor, False)
    channel = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC), 0)
    # Without a collector, forked supervisors go on sharing this process's memory.
    gc.collect()
    gc.freeze()
    gc.disable()
    ForkServer(channel, keep_s, _socket(listener) if listener >= 0 else None, lock, sys.argv[4]).serve()


if __name__ == "__main__":
    main()
