"""The supervisor of one session: it starts the shell, owns everything below it, and ends it.

The fork server forks it with a socket to the worker, see `handover/fork_server.py`. It is a *child subreaper*: all descendants of a session
stay below its supervisor, whatever they call and also when the shell has ended. With bubblewrap it is in the namespaces of its
environment and under a filter of system calls, see `namespace.py`: ids that it says and is told are those inside. Commands there can see
it, kill it and lower its limits, but not trace it. One whose limit on descriptors was lowered ends as if it were killed.

| state    | meaning                                             | next                                                           |
|----------|-----------------------------------------------------|----------------------------------------------------------------|
| waiting  | no shell; processes of earlier commands may be left | `spawn`: serving                                               |
| serving  | the shell runs                                      | it ends by itself, `exited`: waiting; `kill`: ending           |
| ending   | the command's processes get SIGTERM, then SIGKILL;  | none is left, `gone`: waiting                                  |
|          | spared ones of earlier commands go on               |                                                                |
| closing  | the worker has closed its end: all that is below is | none is left: it exits                                         |
|          | killed                                              |                                                                |

Messages are JSON objects:

| to the supervisor                    | answer                                                                       |
|--------------------------------------|------------------------------------------------------------------------------|
| `{"do": "spawn", argv, env, cwd, …}` | `spawned` with pid, or `refused` with reason                                 |
| `{"do": "kill", spared, grace_s}`    | `gone` with max_rss_mb, left: the ids of those that would not die            |
| `{"do": "tell"}`                     | `told` with the pid of the shell; 0 with code, max_rss_mb of the one that ended |
| (the shell ends by itself)           | `exited` with pid, code, max_rss_mb                                          |
| end of file                          | the end of the socket, once nothing is left                                  |

With `spawn` come descriptors, by which the shell joins its control groups: those of the host are out of sight inside.

Rules: the standard library only, one thread, no code of a command ever runs in this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
from typing import Any, NoReturn

from workers.cpu.process import tree
from workers.cpu.process.members import Members, kill
from workers.cpu.process.namespace import reset_signals
from workers.cpu.process.socket_server import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_PDEATHSIG,
    Wakeup,
    end_first,
    prctl,
    serve,
)

MESSAGE_BYTES = 1 << 18
CLOSE_GRACE_S = 0.2
MOST_GROUPS = 4


class Supervisor:
    """Owns the processes of one session, and speaks to the worker through `channel`."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.wakeup = Wakeup()
        self.shell = 0
        self.last_shell: dict[str, float] = {}
        """How the last shell has ended."""
        self.max_rss_mb = 0.0
        # A forked shell starts its record of memory with that of this process.
        self.own_rss_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        self.descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)
        prctl(PR_SET_CHILD_SUBREAPER, 1)

    def serve(self) -> None:
        """Answer until the worker closes its end; then leave no process."""
        serve(self.channel, self.wakeup, self.reap, self.answer)
        self.check_limits()
        self.end_members(set(), CLOSE_GRACE_S)

    def end_members(self, spared: set[tree.Identity], grace_s: float) -> list[int]:
        """End all members but `spared` ones; return the ids of those that would not die."""
        return kill(Members(os.getpid(), self.shell), spared, grace_s, self.wakeup, self.reap)

    def answer(self) -> bool:
        """Do what one message asks; return False at the end of file."""
        try:
            message, groups, flags, _ = socket.recv_fds(self.channel, MESSAGE_BYTES, MOST_GROUPS)
        except ConnectionError:
            return False
        if not message:
            return False
        asked = json.loads(message)
        self.check_limits()
        if flags & socket.MSG_CTRUNC:
            raise OSError("descriptors were lost, so the shell would be outside of its control groups")
        if asked["do"] == "spawn":
            self.spawn(asked, groups)
        elif asked["do"] == "tell":
            self.say("told", pid=self.shell, **self.last_shell)
        else:
            self.kill(asked)
        return True

    def check_limits(self) -> None:
        """Raise `OSError` where a program has lowered this process's own limit: without descriptors it finds no members to end."""
        if resource.getrlimit(resource.RLIMIT_NOFILE) != self.descriptors:
            raise OSError("the limit on the supervisor's descriptors was changed")

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
                self.last_shell = {"code": code if code >= 0 else 128 - code, "max_rss_mb": rss_mb}
                self.say("exited", pid=pid, **self.last_shell)

    def kill(self, asked: dict[str, Any]) -> None:
        """End all but the spared processes and report the largest memory among them."""
        self.max_rss_mb = 0.0
        spared = {(int(pid), int(start)) for pid, start in asked["spared"]}
        left = self.end_members(spared, float(asked["grace_s"]))
        self.reap()  # Some may have ended since the last walk. The end of the shell is reported before this.
        self.say("gone", max_rss_mb=self.max_rss_mb, left=left)

    def spawn(self, asked: dict[str, Any], groups: list[int]) -> None:
        """Start the shell, which joins the control groups of these descriptors."""
        parent = os.getpid()
        try:
            self.shell = os.fork()
        except OSError as error:
            self.say("refused", reason=f"cannot start the shell: {error}")
        else:
            if self.shell == 0:
                self.become_shell(asked, groups, parent)
            self.say("spawned", pid=self.shell)
        finally:
            for descriptor in groups:
                os.close(descriptor)

    def become_shell(self, asked: dict[str, Any], groups: list[int], parent: int) -> NoReturn:
        """Turn this freshly forked process into the shell, or say why that cannot be."""
        try:
            self.wakeup.close()
            end_first()
            for descriptor in groups:
                os.write(descriptor, b"0")
                os.close(descriptor)
            become_shell(asked, parent)
        except BaseException as error:
            self.say("refused", reason=f"cannot run {asked['argv'][0]}: {error}")
        finally:
            os._exit(127)


def become_shell(asked: dict[str, Any], parent: int) -> NoReturn:
    """Turn this freshly forked process into the session's shell, which goes with `parent`."""
    os.setsid()
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    # Should the supervisor be killed, the shell goes too, so that no session lives on unowned.
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(127)
    reset_signals()
    for name, wanted in asked["limits"].items():
        limit(getattr(resource, name), int(wanted))
    os.umask(0o022)
    for folder in (asked["cwd"], asked["home"], "/"):  # commands may have removed or locked each but the last
        with contextlib.suppress(OSError):
            os.chdir(folder)
            break
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.execve(asked["argv"][0], asked["argv"], asked["env"])


def limit(kind: int, wanted: int) -> None:
    """Lower a resource limit of this process, never above what it may have."""
    _, most = resource.getrlimit(kind)
    value = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
    resource.setrlimit(kind, (value, value))
