"""The processes that own the shells: one nursery for a sandbox, one keeper for each session.

Run as `python -m workers.cpu.process.keeper <pids> <cpu> [<descriptor>…]`, with a SOCK_SEQPACKET Unix socket as standard input,
the prefixes of the sessions' control groups (see `groups.py`; empty where there are none), and descriptors that these processes
hold while they live, but no command does. Rules: the standard
library only, one thread, no code of the sandboxed program ever runs in these processes.

Why they exist: forking with set-up code is unsafe in a worker full of threads, but safe here; and a keeper is a
*child subreaper*, so whatever a session starts, however often it forks and calls setsid, stays below its keeper, even
when the shell has died. When the worker dies, each keeper reads the end of its socket, kills all below it, and exits.

    worker ── nursery ── keeper (one a session) ── shell ── the commands

A session that is set apart from the host has a holder too, see `holder.py`: it stands until the keeper exits.

The nursery takes two messages, each with one socket: `keeper` forks a keeper that serves the socket; `kill_orphans` kills
orphans of keepers that were killed, says so with one byte, then closes it. A keeper takes JSON objects and sends JSON objects:

| to the keeper                        | answer                                                                |
|--------------------------------------|-----------------------------------------------------------------------|
| `{"do": "spawn", argv, env, cwd, …}` | `spawned` with pid, keeper, holder (its pids), or `refused` with reason |
| `{"do": "kill", spared, grace_s}`    | `gone` with max_rss_mb, left: pids that would not die                 |
| end of file                          | all below is killed; `ended` unless some would not die; it exits      |
| (the shell ends by itself)           | `exited` with pid, code, max_rss_mb                                   |
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from workers.cpu.process import seccomp, tree
from workers.cpu.process.background import Background, background_of
from workers.cpu.process.ending import KILL_LIMIT_S, Alarm, kill_below
from workers.cpu.process.groups import Groups, join, remove_folder
from workers.cpu.process.holder import Holder, HolderFailed, enter, reset_signals, start_holder
from workers.cpu.process.members import Members

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38
MESSAGE_BYTES = 1 << 18
CLOSE_GRACE_S = 0.2
LEAVING_S = 4.0

_prctl = ctypes.CDLL(None, use_errno=True).prctl


def prctl(option: int, value: int) -> None:
    """Set a property of this process. Raises `OSError` when the kernel refuses."""
    if _prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def attend(channel: socket.socket, alarm: Alarm, reap: Callable[[], None], answer: Callable[[], bool]) -> None:
    """Answer what comes over `channel`, and reap in between, until `answer` says that its other end is closed."""
    poller = select.poll()
    poller.register(channel, select.POLLIN)
    poller.register(alarm.reading, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poller.poll()}
        if alarm.reading in ready:
            alarm.clear()
            reap()
        if channel.fileno() in ready and not answer():
            return


class Keeper:
    """Owns the processes of one session, and speaks to the worker through `channel`."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.alarm = Alarm()
        self.shell = 0
        self.holder: Holder | None = None
        self.background: Background | None = None
        self.folders: list[str] = []
        self.joined: list[str] = []
        self.max_rss_mb = 0.0
        # A forked shell starts its record of memory with that of this process.
        self.own_rss_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        prctl(PR_SET_CHILD_SUBREAPER, 1)

    def serve(self) -> None:
        """Answer until the worker closes its end; then leave no process."""
        attend(self.channel, self.alarm, self.reap, self.answer)
        if self.background is not None:
            # A process without CPU time cannot handle a signal, nor die of one.
            holder = self.holder.pids if self.holder is not None else ()
            self.background.recall(Members(os.getpid(), self.shell, holder), self.background.cores)
        left = kill_below(set(), CLOSE_GRACE_S, self.alarm, self.reap, self.holder)
        if self.holder is not None:
            self.holder.end()
            left = kill_below(set(), 0.0, self.alarm, self.reap)
        for folder in self.folders:
            remove_folder(folder)
        if not left:
            self.say("ended")

    def answer(self) -> bool:
        """Do what one message asks; return False at the end of file."""
        try:
            message = self.channel.recv(MESSAGE_BYTES)
        except ConnectionError:
            return False
        if not message:
            return False
        asked = json.loads(message)
        if asked["do"] == "spawn":
            self.spawn(asked)
        else:
            self.kill(asked)
        return True

    def say(self, event: str, **values: object) -> None:
        """Send one event; a worker that has gone needs none."""
        try:
            self.channel.send(json.dumps({"event": event, **values}).encode())
        except (ConnectionError, BrokenPipeError):
            return

    def reap(self) -> None:
        """Collect every ended child; tell the worker when one was the shell."""
        while True:
            try:
                pid, status, used = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            rss_mb = used.ru_maxrss / 1024
            rss_mb = rss_mb if rss_mb > self.own_rss_mb + 1 else 0.0
            self.max_rss_mb = max(self.max_rss_mb, rss_mb)
            if pid == self.shell:
                self.shell = 0
                code = os.waitstatus_to_exitcode(status)
                self.say("exited", pid=pid, code=code if code >= 0 else 128 - code, max_rss_mb=rss_mb)
            elif self.holder is not None and pid == self.holder.bwrap.pid:
                self.holder.close()
                self.holder = None

    def kill(self, asked: dict[str, Any]) -> None:
        """End all but the spared processes and report the largest memory among them."""
        self.max_rss_mb = 0.0
        spared = {(int(pid), int(start)) for pid, start in asked["spared"]}
        left = kill_below(spared, float(asked["grace_s"]), self.alarm, self.reap, self.holder)
        self.reap()  # who ended between the last look and the last walk; the end of the shell is told before this
        self.say("gone", max_rss_mb=self.max_rss_mb, left=left)

    def spawn(self, asked: dict[str, Any]) -> None:
        """Start the shell, inside of the holder if it is to be set apart."""
        try:
            self.make_group(asked["background"])
            self.shell = self.fork_inside(asked, asked["apart"]) if asked["apart"] else self.fork_shell(asked, os.getpid())
        except OSError as error:
            self.say("refused", reason=f"cannot start the shell: {error}")
        except HolderFailed as error:
            self.say("refused", reason=f"cannot set the shell apart from the host: {error}")
        else:
            self.say("spawned", pid=self.shell, keeper=os.getpid(), holder=self.holder.pids if self.holder is not None else ())

    def make_group(self, asked: dict[str, Any]) -> None:
        """Make the session's control group, unless it is there or there are none. Raises `OSError`."""
        if self.background is None:
            groups = Groups(**asked["groups"])
            # First, so that what is made before something fails is removed at the end.
            self.folders, self.joined = groups.folders(os.getpid()), groups.joined(os.getpid())
            groups.make(os.getpid(), asked["processes"])
            self.background = background_of(asked["means"], asked["cores"], groups)

    def fork_shell(self, asked: dict[str, Any], parent: int | None) -> int:
        """Fork the shell and return its id; it goes with `parent`, unless what it is born in sees to that."""
        shell = os.fork()
        if shell:
            return shell
        try:
            self.alarm.close()
            if parent is not None:
                join(self.joined)
            become_shell(asked, parent)
        except BaseException as error:
            self.say("refused", reason=f"cannot run {asked['argv'][0]}: {error}")
        finally:
            os._exit(127)

    def fork_inside(self, asked: dict[str, Any], apart: dict[str, Any]) -> int:
        """Start the shell inside of the holder and return its id. Raises `HolderFailed`."""
        reason = "bwrap ends as soon as it stands"
        for _ in range(2):
            if self.holder is not None and not self.holder.stands():
                # What is inside has ended it, or is just about to.
                self.holder.end()
                self.holder = None
            if self.holder is None:
                self.holder = start_holder(apart["program"], apart["arguments"])
            shell, reason = self.try_inside(asked, self.holder)
            if shell:
                return shell
            self.holder.end()
            self.holder = None
        raise HolderFailed(reason)

    def try_inside(self, asked: dict[str, Any], holder: Holder) -> tuple[int, str]:
        """Return the id of a shell inside of `holder`, or 0 and why there is none."""
        reading, writing = os.pipe2(os.O_CLOEXEC)
        messenger = os.fork()
        if messenger == 0:
            said = "0 "
            try:
                join(self.joined)
                enter(holder)
                asked["filter"] = seccomp.FILTER
                said = f"{self.fork_shell(asked, None)} "
            except OSError as error:
                said = f"0 cannot enter its namespaces: {error}"
            finally:
                os.write(writing, said.encode())
                os._exit(0)
        os.close(writing)
        with open(reading, "rb") as file:
            number, _, reason = file.read().decode().partition(" ")
        os.waitpid(messenger, 0)
        return int(number or 0), reason


def become_shell(asked: dict[str, Any], parent: int | None) -> NoReturn:
    """Turn this freshly forked process into the session's shell, which goes with `parent` if there is one."""
    os.setsid()
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    if parent is not None:
        # Should the keeper be killed, the shell goes too, so that no session lives on unowned.
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(127)
    reset_signals()
    for name, wanted in asked["limits"].items():
        limit(getattr(resource, name), int(wanted))
    os.umask(0o022)
    try:
        os.chdir(asked["cwd"])
    except OSError:
        os.chdir(asked["home"])
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    if asked.get("filter"):
        seccomp.install(asked["filter"])
    os.execve(asked["argv"][0], asked["argv"], asked["env"])


def limit(kind: int, wanted: int) -> None:
    """Lower a resource limit of this process, never above what it may have."""
    _, most = resource.getrlimit(kind)
    value = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
    resource.setrlimit(kind, (value, value))


class Nursery:
    """Forks keepers on request and buries them, with the control groups of those that were killed."""

    def __init__(self, channel: socket.socket, groups: Groups | None = None) -> None:
        self.channel, self.groups = channel, groups or Groups()
        self.alarm = Alarm()
        self.keepers: set[int] = set()
        self.left_folders: set[str] = set()
        prctl(PR_SET_CHILD_SUBREAPER, 1)

    def serve(self) -> None:
        """Answer until the worker closes its end, then wait for the keepers to leave and kill what is left."""
        attend(self.channel, self.alarm, self.reap, self.answer)
        deadline = time.monotonic() + LEAVING_S
        while self.keepers and time.monotonic() < deadline:
            # They see the end of their sockets too. One that is killed instead would leave its control group.
            select.select([self.alarm.reading], [], [], deadline - time.monotonic())
            self.alarm.clear()
            self.reap()
        kill_below(set(), 2 * CLOSE_GRACE_S, self.alarm, self.reap)
        self.remove_groups()

    def answer(self) -> bool:
        """Do what one message asks; return False at the end of file."""
        try:
            message, descriptors, _, _ = socket.recv_fds(self.channel, 64, 1)
        except ConnectionError:
            return False
        if not message:
            return False
        # Descriptors that came over a socket would otherwise be inherited by the shells.
        os.set_inheritable(descriptors[0], False)
        if message == b"keeper":
            self.fork_keeper(descriptors[0])
        elif self.kill_orphans():
            with contextlib.suppress(ConnectionError, BrokenPipeError):
                os.write(descriptors[0], b"1")
        os.close(descriptors[0])
        return True

    def fork_keeper(self, descriptor: int) -> None:
        """Fork a keeper that serves the socket `descriptor`; failing to is seen as the end of that socket."""
        try:
            pid = os.fork()
        except OSError:
            return
        if pid:
            self.keepers.add(pid)
            self.left_folders.difference_update(self.groups.folders(pid))
            return
        try:
            self.alarm.close()
            self.channel.close()
            Keeper(socket.socket(fileno=descriptor)).serve()
        finally:
            os._exit(0)

    def kill_orphans(self) -> bool:
        """Kill what keepers that died by force have left to this process; return whether none of it is left.

        A dying keeper closes its socket, which is what the worker hears, before its children become this process's.
        """
        deadline = time.monotonic() + KILL_LIMIT_S
        self.reap()
        while any(map(tree.is_exiting, self.keepers)) and time.monotonic() < deadline:
            select.select([self.alarm.reading], [], [], 0.005)
            self.alarm.clear()
            self.reap()
        spared = {process.identity for process in map(tree.read_process, self.keepers) if process is not None}
        left = kill_below(spared, 0.0, self.alarm, self.reap)
        self.remove_groups()
        return not left

    def remove_groups(self) -> None:
        """Remove the control groups of killed keepers, which are empty now."""
        for folder in self.left_folders:
            remove_folder(folder)
        self.left_folders.clear()

    def reap(self) -> None:
        """Collect ended keepers and strangers."""
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self.keepers:
                self.keepers.discard(pid)
                # One that ends in order has removed its group.
                self.left_folders.update(filter(os.path.exists, self.groups.folders(pid)))


def main() -> None:
    """Serve the socket on standard input until the worker closes it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    pids, cpu, *descriptors = sys.argv[1:]
    for descriptor in map(int, descriptors):
        os.set_inheritable(descriptor, False)
    channel = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC), 0)
    # Without a collector, forked keepers go on sharing this process's memory.
    gc.collect()
    gc.freeze()
    gc.disable()
    Nursery(channel, Groups(pids or None, cpu or None)).serve()


if __name__ == "__main__":
    main()
