"""The supervisor of one session: it starts the shell, owns everything below it, and ends it.

The fork server forks it with a socket to the worker, see `fork_server.py`. It is a *child subreaper*: all descendants of a session
stay below its supervisor, whatever they call and also when the shell has ended. With bubblewrap they are in one PID namespace too,
which a namespace anchor holds, see `namespace.py`.

| state    | meaning                                             | next                                                           |
|----------|-----------------------------------------------------|----------------------------------------------------------------|
| waiting  | no shell; processes of earlier commands may be left | `spawn`: serving                                               |
| serving  | the shell runs                                      | it ends by itself, `exited`: waiting; `kill`: ending           |
| ending   | the command's processes get SIGTERM, then SIGKILL;  | none is left, `gone`: waiting                                  |
|          | spared ones of earlier commands go on               |                                                                |
| closing  | the worker has closed its end: all that is below is | none is left: it removes its control group and exits           |
|          | killed, the anchor too                              |                                                                |

Messages are JSON objects:

| to the supervisor                    | answer                                                                       |
|--------------------------------------|------------------------------------------------------------------------------|
| `{"do": "spawn", argv, env, cwd, …}` | `spawned` with pid, supervisor, anchor (their ids), or `refused` with reason |
| `{"do": "kill", spared, grace_s}`    | `gone` with max_rss_mb, left: the ids of those that would not die            |
| (the shell ends by itself)           | `exited` with pid, code, max_rss_mb                                          |
| end of file                          | the end of the socket, once nothing is left                                  |

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

from workers.cpu.process import seccomp, tree
from workers.cpu.process.background import Background, background_of
from workers.cpu.process.groups import Groups, join, remove_folder
from workers.cpu.process.members import Members, kill
from workers.cpu.process.namespace import Anchor, AnchorFailed, enter, reset_signals, start_anchor
from workers.cpu.process.serving import PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_SET_PDEATHSIG, Wakeup, prctl, serve

MESSAGE_BYTES = 1 << 18
CLOSE_GRACE_S = 0.2


class Supervisor:
    """Owns the processes of one session, and speaks to the worker through `channel`."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.wakeup = Wakeup()
        self.shell = 0
        self.anchor: Anchor | None = None
        self.background: Background | None = None
        self.folders: list[str] = []
        self.joined: list[str] = []
        self.max_rss_mb = 0.0
        # A forked shell starts its record of memory with that of this process.
        self.own_rss_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        prctl(PR_SET_CHILD_SUBREAPER, 1)

    def serve(self) -> None:
        """Answer until the worker closes its end; then leave no process."""
        serve(self.channel, self.wakeup, self.reap, self.answer)
        if self.background is not None:
            # A process without CPU time cannot handle a signal, nor die of one.
            self.background.recall(self.members, self.background.cores)
        self.end_members(set(), CLOSE_GRACE_S)
        if self.anchor is not None:
            self.anchor.end()
            kill(Members(os.getpid()), set(), 0.0, self.wakeup, self.reap)
        for folder in self.folders:
            remove_folder(folder)

    @property
    def members(self) -> Members:
        """Return the processes of the session."""
        return Members(os.getpid(), self.shell, self.anchor.pids if self.anchor is not None else ())

    def end_members(self, spared: set[tree.Identity], grace_s: float) -> list[int]:
        """End all members but `spared` ones; return the ids of those that would not die."""
        end_anchor = self.anchor.end if self.anchor is not None else None
        return kill(self.members, spared, grace_s, self.wakeup, self.reap, end_anchor)

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
            elif self.anchor is not None and pid == self.anchor.bwrap.pid:
                self.anchor.close()
                self.anchor = None

    def kill(self, asked: dict[str, Any]) -> None:
        """End all but the spared processes and report the largest memory among them."""
        self.max_rss_mb = 0.0
        spared = {(int(pid), int(start)) for pid, start in asked["spared"]}
        left = self.end_members(spared, float(asked["grace_s"]))
        self.reap()  # Some may have ended since the last walk. The end of the shell is reported before this.
        self.say("gone", max_rss_mb=self.max_rss_mb, left=left)

    def spawn(self, asked: dict[str, Any]) -> None:
        """Start the shell, inside of the anchor if it is to be set apart."""
        try:
            self.make_group(asked["background"])
            self.shell = self.fork_inside(asked, asked["apart"]) if asked["apart"] else self.fork_shell(asked, os.getpid())
        except OSError as error:
            self.say("refused", reason=f"cannot start the shell: {error}")
        except AnchorFailed as error:
            self.say("refused", reason=f"cannot set the shell apart from the host: {error}")
        else:
            self.say("spawned", pid=self.shell, supervisor=os.getpid(), anchor=self.members.anchor)

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
            self.wakeup.close()
            if parent is not None:
                join(self.joined)
            become_shell(asked, parent)
        except BaseException as error:
            self.say("refused", reason=f"cannot run {asked['argv'][0]}: {error}")
        finally:
            os._exit(127)

    def fork_inside(self, asked: dict[str, Any], apart: dict[str, Any]) -> int:
        """Start the shell inside of the anchor and return its id. Raises `AnchorFailed`."""
        reason = "bwrap ends as soon as it stands"
        for _ in range(2):
            if self.anchor is not None and not self.anchor.stands():
                # What is inside has ended it, or is just about to.
                self.anchor.end()
                self.anchor = None
            if self.anchor is None:
                self.anchor = start_anchor(apart["program"], apart["arguments"])
            shell, reason = self.try_inside(asked, self.anchor)
            if shell:
                return shell
            self.anchor.end()
            self.anchor = None
        raise AnchorFailed(reason)

    def try_inside(self, asked: dict[str, Any], anchor: Anchor) -> tuple[int, str]:
        """Return the id of a shell inside of `anchor`, or 0 and why there is none."""
        reading, writing = os.pipe2(os.O_CLOEXEC)
        messenger = os.fork()
        if messenger == 0:
            said = "0 "
            try:
                join(self.joined)
                enter(anchor)
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
        # Should the supervisor be killed, the shell goes too, so that no session lives on unowned.
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(127)
    reset_signals()
    # Where the memory of the machine is full, the kernel is to end programs first, and none of ours.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")
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
