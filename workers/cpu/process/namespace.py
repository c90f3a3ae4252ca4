"""What holds the namespaces of a session that is set apart by bubblewrap, and how a process gets into them.

Rules: the standard library only, one thread; the supervisor process imports this file.

    supervisor ─┬─ bwrap ── init ─┬─ pause          the anchor: three processes that stand as long as the session
            │                 └─ orphans        of processes inside, which their init adopts
            └─ shell ── the commands

The shell is no child of bwrap's. The supervisor forks a process that joins the anchor's namespaces (setns(2)), gives every
capability up and forks the shell, which thereby is born inside. Then it ends, and the shell becomes the supervisor's child.
So the supervisor knows the shell, its end and its exit code as it does without an anchor; a shell that ends costs neither the
processes that it left behind nor their network. When init ends, for whatever reason, the kernel ends all that is inside.

The user that runs the supervisor has made the namespaces and may therefore enter them: no root is needed. The order matters.
bwrap nests two user namespaces; the others belong to the outer one, and the inner one is that of the commands.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from workers.cpu.process import seccomp, tree

START_LIMIT_S = 60.0
PR_SET_DUMPABLE, PR_CAPBSET_READ, PR_CAPBSET_DROP, PR_CAP_AMBIENT = 4, 23, 24, 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
CAPABILITY_VERSION_3 = 0x20080522
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
NS_GET_USERNS = 0xB701
NAMESPACES = ("cgroup", "ipc", "uts", "net", "mnt", "pid")
PAUSE = ("/bin/sh", "-c", "echo ready; read -r line")

_libc = ctypes.CDLL(None, use_errno=True)


class AnchorFailed(Exception):
    """Raised when the namespaces could not be made, or not be entered."""


@dataclass(slots=True)
class Anchor:
    """The processes of an anchor, as the supervisor sees them; it goes when `lifeline` is closed."""

    bwrap: tree.Process
    init: tree.Process
    pause: tree.Process
    lifeline: int

    @property
    def pids(self) -> tuple[int, int, int]:
        """Return the ids of bwrap, init and pause."""
        return (self.bwrap.pid, self.init.pid, self.pause.pid)

    def stands(self) -> bool:
        """Return whether all of it lives."""
        for process in (self.bwrap, self.init, self.pause):
            current = tree.read_process(process.pid)
            if current is None or current.identity != process.identity or current.state in "ZX":
                return False
        return True

    def end(self) -> None:
        """Have the kernel end everything inside, and the anchor."""
        for process in (self.init, self.bwrap):
            tree.send(process, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        """Give the descriptor back."""
        if self.lifeline >= 0:
            os.close(self.lifeline)
            self.lifeline = -1


def start_anchor(program: str, arguments: Sequence[str]) -> Anchor:
    """Run bwrap with `arguments`, and return once the namespaces stand.

    Raises
    ------
    AnchorFailed
        With what bwrap said, or that it took longer than `START_LIMIT_S` seconds.

    """
    lifeline, said = os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC)
    try:
        pid = os.fork()
    except OSError as error:
        for descriptor in (*lifeline, *said):
            os.close(descriptor)
        raise AnchorFailed(f"cannot fork: {error.strerror}") from error
    if pid == 0:
        try:
            _become_bwrap(program, arguments, lifeline[0], said[1])
        finally:
            os._exit(127)
    os.close(lifeline[0])
    os.close(said[1])
    try:
        _await_ready(said[0])
        return Anchor(*_processes(pid), lifeline=lifeline[1])
    except AnchorFailed:
        os.close(lifeline[1])
        # Not waited for yet, so the id is still its own.
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    finally:
        os.close(said[0])


def _become_bwrap(program: str, arguments: Sequence[str], lifeline: int, said: int) -> NoReturn:
    os.setsid()
    os.chdir("/")
    os.umask(0o022)
    reset_signals()
    for descriptor, wanted in ((lifeline, 0), (said, 1), (said, 2)):
        os.dup2(descriptor, wanted)
    # What is inside could trace these processes, so they are held to the filter too.
    held = ["--seccomp", str(_file("filter", seccomp.FILTER or b""))]
    # Not on the command line, where the commands could read how the host is laid out.
    text = _file("arguments", b"".join(os.fsencode(argument) + b"\0" for argument in (*held, *arguments)))
    try:
        os.execve(program, [program, "--args", str(text), "--", *PAUSE], {"PATH": os.defpath, "LANG": "C.UTF-8"})
    except OSError as error:
        os.write(2, f"cannot run {program}: {error.strerror}".encode())
        os._exit(127)


def _file(name: str, content: bytes) -> int:
    """Return the descriptor of a file without a path, which a program that is executed inherits."""
    descriptor = os.memfd_create(name, 0)
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def reset_signals() -> None:
    """Give every signal its default effect: Python ignores SIGPIPE and SIGXFSZ, and what is ignored stays so across exec."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) is not None and signal.getsignal(number) is not signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)


def _await_ready(said: int) -> None:
    deadline, heard = time.monotonic() + START_LIMIT_S, b""
    while not heard.endswith(b"ready\n"):
        if not select.select([said], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise AnchorFailed(f"bwrap was not ready within {START_LIMIT_S:g} s")
        chunk = os.read(said, 4096)
        if not chunk:
            lines = heard.decode(errors="replace").strip().splitlines()
            raise AnchorFailed(lines[-1] if lines else "bwrap ended without a word")
        heard += chunk


def _processes(pid: int) -> tuple[tree.Process, tree.Process, tree.Process]:
    """Return bwrap and the two below it, which are all there is before the first shell."""
    found = [tree.read_process(pid), *tree.descendants(pid)]
    match found:
        case [tree.Process() as bwrap, tree.Process() as init, tree.Process() as pause]:
            return bwrap, init, pause
    raise AnchorFailed(f"bwrap runs as {len(found)} processes, not as three")


def enter(anchor: Anchor) -> None:
    """Let what this process forks from now on be born inside, without any capability.

    Raises
    ------
    OSError
        When the kernel refuses; this process may then be half inside, and is of no use.

    """
    # What is inside must not trace this process, nor reach the host through its descriptors, before it runs the shell.
    _check(_libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0))
    folder = f"/proc/{anchor.pause.pid}/ns"
    spaces = [_Space(f"{folder}/{name}") for name in NAMESPACES if not _is_own(f"{folder}/{name}", name)]
    inner = _Space(f"{folder}/user")
    outer = fcntl.ioctl(_Space(f"{folder}/mnt").descriptor, NS_GET_USERNS)
    if not anchor.stands():
        raise OSError("the anchor has ended")
    _check(_libc.setns(outer, CLONE_NEWUSER))
    for space in spaces:
        _check(_libc.setns(space.descriptor, 0))
    if os.fstat(inner.descriptor).st_ino != os.fstat(outer).st_ino:
        _check(_libc.setns(inner.descriptor, CLONE_NEWUSER))
    give_up_capabilities()


def enter_network(pause: int, stands: Callable[[], bool]) -> None:
    """Let the sockets that this process makes from now on be of the network of an anchor, whose last process is `pause`.

    `stands` says whether the anchor, which is asked for by the ids of processes, is still the one that is meant.

    Raises
    ------
    OSError
        When the kernel refuses, or the network is this process's own; the process is then of no use.

    """
    _check(_libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0))
    folder = f"/proc/{pause}/ns"
    network = _Space(f"{folder}/net")
    outer = fcntl.ioctl(_Space(f"{folder}/mnt").descriptor, NS_GET_USERNS)
    if not stands():
        raise OSError("the anchor has ended")
    if _is_own(f"{folder}/net", "net"):
        raise OSError("the session has no network of its own")
    _check(_libc.setns(outer, CLONE_NEWUSER))
    _check(_libc.setns(network.descriptor, CLONE_NEWNET))
    give_up_capabilities()


class _Space:
    """An open namespace; the descriptor ends with this process or with its exec."""

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _is_own(path: str, name: str) -> bool:
    return os.stat(path).st_ino == os.stat(f"/proc/self/ns/{name}").st_ino


def give_up_capabilities() -> None:
    """Empty all five sets of this process, so that no program that it runs gains one."""
    capability = 0
    while _libc.prctl(PR_CAPBSET_READ, capability, 0, 0, 0) >= 0:
        _check(_libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0))
        capability += 1
    with contextlib.suppress(OSError):  # Kernels before 4.3 have no ambient set.
        _check(_libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0))
    header, none = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    _check(_libc.capset(header, none))


def _check(answer: int) -> None:
    if answer != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
