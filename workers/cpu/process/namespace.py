"""The namespaces of an environment that is set apart: how the anchor that holds them is made, and how a process gets into them.

Rules: the standard library only, one thread; the fork server imports this file.

    fork server ─┬─ bwrap ── init ── pause               the anchor: it stands as long as its environment
                 ├─ supervisor ── shell ── commands      a session; inside
                 └─ supervisor ── …

A supervisor is no child of bwrap's. The fork server forks a process that joins the anchor's namespaces (setns(2)), gives every
capability up, and forks the supervisor, which thereby is born inside. Then that process ends, and the supervisor becomes the fork
server's child. When init ends, for whatever reason, the kernel ends all that is inside.

The user that runs the worker has made the namespaces and may therefore enter them: no root is needed. The order matters.
bwrap nests two user namespaces; the others belong to the outer one, and the inner one is that of the commands. Where the worker is root,
both are made here, and an environment's commands are a user of their own; see `users.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import socket
from collections.abc import Callable, Sequence
from typing import NoReturn

from workers.cpu import control_files
from workers.cpu.libc import CAPABILITY_VERSION_3, MS_NOEXEC, MS_NOSUID, MS_REMOUNT, check, libc, mount
from workers.cpu.process import seccomp

PR_SET_DUMPABLE, PR_CAPBSET_READ, PR_CAPBSET_DROP, PR_SET_SECUREBITS, PR_CAP_AMBIENT = 4, 23, 24, 28, 47
SECBIT_NO_SETUID_FIXUP = 4
PR_CAP_AMBIENT_CLEAR_ALL = 4
CLONE_NEWUSER = 0x10000000
NS_GET_USERNS = 0xB701
NAMESPACES = ("cgroup", "ipc", "uts", "net", "mnt", "pid")
USER_ID = 1000
"""The user and group of the commands, inside."""
MOST_TERMINALS = 64
TERMINALS = f"newinstance,ptmxmode=0666,mode=620,max={MOST_TERMINALS}"
"""The options of the file system of an environment's terminals."""
READY = b"ready\n"
PAUSE = ("/bin/sh", "-c", "echo ready; read -r line")
"""What the anchor runs: it says that the namespaces stand, and ends with the connection to the worker."""

Stands = Callable[[], bool]
"""Says whether the anchor, which is asked for by the ids of processes, is still the one that is meant."""


def become_bwrap(program: str, arguments: Sequence[str], user: int, channel: int) -> NoReturn:
    """Turn this freshly forked process into bwrap. It says over `channel` that it is ready, or what is wrong, and ends with it.

    The commands are the host's user `user`; with 0 they are the user of this process.
    """
    speak_through(channel)
    try:
        # What is inside could trace these processes, so they are held to the filter too.
        held = ["--seccomp", str(_file("filter", seccomp.FILTER or b""))]
        if user:
            inner = share_with(user)
            os.set_inheritable(inner, True)
            held += ["--userns2", str(inner)]
        # Not on the command line, where the commands could read how the host is laid out.
        text = _file("arguments", b"".join(os.fsencode(argument) + b"\0" for argument in (*held, *arguments)))
        os.execve(program, [os.path.basename(program), "--args", str(text), "--", *PAUSE], {"PATH": os.defpath, "LANG": "C.UTF-8"})
    except OSError as error:
        os.write(2, f"cannot run {program}: {error}".encode())
        os._exit(127)


def share_with(user: int) -> int:
    """Move this process, which is root, to a user namespace where the host's root and `user` have ids; return one below, for `user` alone.

    A helper writes the ids of the first namespace from outside, and then makes the second one from inside. Raises `OSError`.
    """
    first, (ours, theirs) = os.getpid(), socket.socketpair()
    if (helper := os.fork()) == 0:
        try:
            ours.close()
            theirs.recv(1)
            _give_ids(first, f"0 0 1\n{USER_ID} {user} 1")
            check(libc.setns(_Space(f"/proc/{first}/ns/user").descriptor, CLONE_NEWUSER), "setns")
            check(libc.unshare(CLONE_NEWUSER), "unshare")
            # The first process has to see this one.
            check(libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl")
            theirs.send(b".")
            theirs.recv(1)
        except OSError as error:
            os.write(2, f"a user of its own cannot be given: {error}\n".encode())
        finally:
            os._exit(0)
    theirs.close()
    with ours:
        # What is counted inside is counted for whoever has made the namespace, too. Root's rights to make one are kept meanwhile.
        check(libc.prctl(PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP, 0, 0, 0), "prctl")
        os.seteuid(user)
        check(libc.unshare(CLONE_NEWUSER), "unshare")
        ours.send(b".")
        if not ours.recv(1):
            raise OSError("its user namespaces cannot be made")
        os.seteuid(0)
        _give_ids(helper, f"{USER_ID} {USER_ID} 1")
        inner = _Space(f"/proc/{helper}/ns/user").descriptor
        # No namespace of users can be made below that one.
        control_files.write("/proc/sys/user/max_user_namespaces", "1")
    os.waitpid(helper, 0)
    return inner


def _give_ids(pid: int, lines: str) -> None:
    for name in ("uid_map", "gid_map"):
        control_files.write(f"/proc/{pid}/{name}", lines)


def speak_through(channel: int) -> None:
    """Let this freshly forked process have a session of its own, the usual signals, and `channel` for all its streams."""
    os.setsid()
    os.chdir("/")
    os.umask(0o022)
    reset_signals()
    for descriptor in (0, 1, 2):
        os.dup2(channel, descriptor)


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


def enter(pause: int, stands: Stands) -> None:
    """Let what this process forks from now on be born in the namespaces of an anchor, whose last process is `pause`.

    It keeps no capability. Raises `OSError` when the kernel refuses; this process may then be half inside, and is of no use.
    """
    names = [name for name in NAMESPACES if not _is_own(pause, name)]
    if os.geteuid() == 0:
        with contextlib.suppress(PermissionError):  # A root that may not choose groups may not choose users either.
            os.setgroups([])
    inner, outer = _join(pause, stands, names)
    # The kernel has a few thousand terminals for the whole machine, and bwrap sets no bound.
    mount(None, "/dev/pts", None, MS_REMOUNT | MS_NOSUID | MS_NOEXEC, TERMINALS)
    if os.fstat(inner.descriptor).st_ino != os.fstat(outer).st_ino:
        check(libc.setns(inner.descriptor, CLONE_NEWUSER))
    if os.geteuid() != USER_ID:
        os.setresgid(USER_ID, USER_ID, USER_ID)
        os.setresuid(USER_ID, USER_ID, USER_ID)
    # The kernel sets this anew with a change of user, to what `fs.suid_dumpable` says.
    check(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0))
    give_up_capabilities()


def enter_network(pause: int, stands: Stands) -> None:
    """Let the sockets that this process makes from now on be of the network of an anchor, whose last process is `pause`.

    Raises `OSError` when the kernel refuses, or the network is this process's own; the process is then of no use.
    """
    if _is_own(pause, "net"):
        raise OSError("the environment has no network of its own")
    _join(pause, stands, ["net"])
    give_up_capabilities()


def _join(pause: int, stands: Stands, names: Sequence[str]) -> tuple[_Space, int]:
    """Join the outer user namespace of an anchor, and then namespaces of these names. Return the inner and the outer user namespace."""
    # What is inside must not trace this process, nor reach the host through its descriptors, before it runs the shell.
    check(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0))
    folder = f"/proc/{pause}/ns"
    spaces, inner = [_Space(f"{folder}/{name}") for name in names], _Space(f"{folder}/user")
    outer = fcntl.ioctl(_Space(f"{folder}/mnt").descriptor, NS_GET_USERNS)
    if not stands():
        raise OSError("the anchor has ended")
    check(libc.setns(outer, CLONE_NEWUSER))
    for space in spaces:
        check(libc.setns(space.descriptor, 0))
    return inner, outer


class _Space:
    """An open namespace; the descriptor ends with this process or with its exec."""

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _is_own(pause: int, name: str) -> bool:
    return os.stat(f"/proc/{pause}/ns/{name}").st_ino == os.stat(f"/proc/self/ns/{name}").st_ino


def give_up_capabilities() -> None:
    """Empty all five sets of this process, so that no program that it runs gains one."""
    capability = 0
    while libc.prctl(PR_CAPBSET_READ, capability, 0, 0, 0) >= 0:
        check(libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0))
        capability += 1
    with contextlib.suppress(OSError):  # Kernels before 4.3 have no ambient set.
        check(libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0))
    header, none = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    check(libc.capset(header, none))
