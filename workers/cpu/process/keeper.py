"""The processes that own the shells: one nursery for a sandbox, one keeper for each session.

Run as `python -m workers.cpu.process.keeper`, with a SOCK_SEQPACKET Unix socket as standard input. Rules: the standard
library only, one thread, no code of the sandboxed program ever runs in these processes.

Why they exist: forking with set-up code is unsafe in a worker full of threads, but safe here; and a keeper is a
*child subreaper*, so whatever a session starts, however often it forks and calls setsid, stays below its keeper, even
when the shell has died. When the worker dies, each keeper reads the end of its socket, kills all below it, and exits.

    worker ── nursery ── keeper (one a session) ── shell ── the commands

The nursery takes two messages, each with one socket: `keeper` forks a keeper that serves the socket; `fence` kills
orphans of keepers that were killed, then closes it. A keeper takes JSON objects and sends JSON objects:

| to the keeper                        | answer                                                       |
|--------------------------------------|--------------------------------------------------------------|
| `{"do": "spawn", argv, env, cwd, …}` | `spawned` with pid and keeper, or `refused` with reason      |
| `{"do": "kill", spared, grace_s}`    | `gone` with max_rss_mb, left: pids that would not die        |
| end of file                          | all below is killed, the keeper exits                        |
| (the shell ends by itself)           | `exited` with pid, code, max_rss_mb                          |
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Callable
from typing import Any, NoReturn

from workers.cpu.process import tree

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38
MESSAGE_BYTES = 1 << 18
KILL_LIMIT_S = 10.0
CLOSE_GRACE_S = 0.2

_prctl = ctypes.CDLL(None, use_errno=True).prctl


def prctl(option: int, value: int) -> None:
    """Set a property of this process. Raises `OSError` when the kernel refuses."""
    if _prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


class Alarm:
    """A file descriptor that becomes readable when a child has ended."""

    def __init__(self) -> None:
        self.reading, self._writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def clear(self) -> None:
        """Take the pending wake-ups."""
        try:
            os.read(self.reading, 4096)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Give the descriptors back, in the child of a fork."""
        signal.set_wakeup_fd(-1)
        os.close(self.reading)
        os.close(self._writing)


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


def kill_below(spared: set[tree.Identity], grace_s: float, alarm: Alarm, reap: Callable[[], None]) -> list[int]:
    """End the processes below this one: SIGTERM, after `grace_s` seconds SIGKILL, until none is found.

    Returns the ids of those that still live `KILL_LIMIT_S` seconds later (stuck in the kernel).
    """
    began = time.monotonic()
    me = os.getpid()
    if grace_s > 0:
        for process in tree.descendants(me, spared):
            tree.send(process, signal.SIGTERM)
            # A stopped process takes the signal only once it goes on.
            tree.send(process, signal.SIGCONT)
    while True:
        reap()
        living = tree.descendants(me, spared)
        age_s = time.monotonic() - began
        if not living or age_s > KILL_LIMIT_S:
            return [process.pid for process in living]
        if age_s >= grace_s:
            for process in living:
                tree.send(process, signal.SIGKILL)
        select.select([alarm.reading], [], [], 0.005)
        alarm.clear()


class Keeper:
    """Owns the processes of one session, and speaks to the worker through `channel`."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.alarm = Alarm()
        self.shell = 0
        self.max_rss_mb = 0.0
        # A forked shell starts its record of memory with that of this process.
        self.own_rss_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        prctl(PR_SET_CHILD_SUBREAPER, 1)

    def serve(self) -> None:
        """Answer until the worker closes its end; then leave no process."""
        attend(self.channel, self.alarm, self.reap, self.answer)
        kill_below(set(), CLOSE_GRACE_S, self.alarm, self.reap)

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

    def kill(self, asked: dict[str, Any]) -> None:
        """End all but the spared processes and report the largest memory among them."""
        self.max_rss_mb = 0.0
        spared = {(int(pid), int(start)) for pid, start in asked["spared"]}
        left = kill_below(spared, float(asked["grace_s"]), self.alarm, self.reap)
        self.say("gone", max_rss_mb=self.max_rss_mb, left=left)

    def spawn(self, asked: dict[str, Any]) -> None:
        """Fork the shell."""
        parent = os.getpid()
        try:
            self.shell = os.fork()
        except OSError as error:
            self.say("refused", reason=f"cannot fork: {error.strerror}")
            return
        if self.shell:
            self.say("spawned", pid=self.shell, keeper=parent)
            return
        try:
            self.alarm.close()
            become_shell(asked, parent)
        except BaseException as error:
            self.say("refused", reason=f"cannot run {asked['argv'][0]}: {error}")
        finally:
            os._exit(127)


def become_shell(asked: dict[str, Any], parent: int) -> NoReturn:
    """Turn this freshly forked process into the session's shell."""
    os.setsid()
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    # Should the keeper be killed, the shell goes too, so that no session lives on unowned.
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(127)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        # Python ignores SIGPIPE and SIGXFSZ, and what is ignored stays ignored across exec.
        if signal.getsignal(number) is not None and signal.getsignal(number) is not signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
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
    os.execve(asked["argv"][0], asked["argv"], asked["env"])


def limit(kind: int, wanted: int) -> None:
    """Lower a resource limit of this process, never above what it may have."""
    _, most = resource.getrlimit(kind)
    value = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
    resource.setrlimit(kind, (value, value))


class Nursery:
    """Forks keepers on request and buries them."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.alarm = Alarm()
        self.keepers: set[int] = set()
        prctl(PR_SET_CHILD_SUBREAPER, 1)

    def serve(self) -> None:
        """Answer until the worker closes its end, then wait for the keepers to leave and kill what is left."""
        attend(self.channel, self.alarm, self.reap, self.answer)
        kill_below(set(), 2 * CLOSE_GRACE_S, self.alarm, self.reap)

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
        else:
            self.fence()
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
            return
        try:
            self.alarm.close()
            self.channel.close()
            Keeper(socket.socket(fileno=descriptor)).serve()
        finally:
            os._exit(0)

    def fence(self) -> None:
        """Kill what keepers that died by force have left to this process."""
        self.reap()
        spared = {process.identity for process in map(tree.read_process, self.keepers) if process is not None}
        kill_below(spared, 0.0, self.alarm, self.reap)

    def reap(self) -> None:
        """Collect ended keepers and strangers."""
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.keepers.discard(pid)


def main() -> None:
    """Serve the socket on standard input until the worker closes it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    channel = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC), 0)
    # Without a collector, forked keepers go on sharing this process's memory.
    gc.collect()
    gc.freeze()
    gc.disable()
    Nursery(channel).serve()


if __name__ == "__main__":
    main()
