"""Makes the namespaces of an environment where there is no bubblewrap: the same view, by the same steps.

Rules: the standard library only, one thread; the fork server imports this file. Nothing may be imported later: once the root folder
has changed, no module is to be found.

    fork server ── holder ── init ── pause

The three processes are those of `namespace.py`, in bwrap's place. The holder makes a user namespace in which it is root, and the other
namespaces below it. Init mounts what is to be seen below a new root folder, changes into that, and makes a second user namespace, in which
the user has an ordinary id. Then it reaps what is orphaned inside, until the pause ends. Bubblewrap has been looked at by many for ways
out, and this has not. So it is promised to be a view, and no protection.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import struct
from collections.abc import Sequence
from typing import NoReturn

from workers.cpu import control_files
from workers.cpu.libc import (
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REC,
    MS_REMOUNT,
    check,
    libc,
    mount,
)
from workers.cpu.process import seccomp
from workers.cpu.process.namespace import CLONE_NEWUSER, PAUSE, TERMINALS, USER_ID, give_up_capabilities, share_with, speak_through
from workers.cpu.process.socket_server import PR_SET_NO_NEW_PRIVS, PR_SET_PDEATHSIG, prctl

OTHERS = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000
"""Mounts, control groups, host name, IPC, processes, network."""
SYS_MOUNT_SETATTR = 442
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV = 1, 2, 4
MNT_DETACH = 2
SIOCSIFFLAGS, IFF_UP, IFF_RUNNING = 0x8914, 0x1, 0x40
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
DEVICE_LINKS = (
    *(("/proc/self/fd", "fd"), ("/proc/self/fd/0", "stdin"), ("/proc/self/fd/1", "stdout"), ("/proc/self/fd/2", "stderr")),
    *(("pts/ptmx", "ptmx"), ("/proc/kcore", "core")),
)


def become_holder(steps: Sequence[Sequence[str]], host_name: str, user: int, channel: int) -> NoReturn:
    """Turn this freshly forked process into the holder. Over `channel` comes `ready`, or what is wrong; its end is the end of all.

    Each step is a word and its paths: `root`, the folder to mount the new root on; `ro-bind`, `ro-bind-try` and `bind` with source and
    place; `symlink` with target and place; `tmpfs` with place and bytes; `proc` and `dev` with their place; `remount-ro`
    with place, nothing for the root. The commands are the host's user `user`; with 0 they are the user of this process.
    """
    try:
        speak_through(channel)
        # The fork server's sockets are among them, whose end would not be seen.
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        server = os.getppid()
        inner = -1
        if user:
            inner = share_with(user)
        else:
            _become_user(0, os.geteuid(), os.getegid())
        check(libc.unshare(OTHERS), "unshare")
        _die_with(server)
        init = os.fork()
        if init == 0:
            _become_init(steps, host_name, inner)
        give_up_capabilities()
        os.waitpid(init, 0)
    except OSError as error:
        os.write(2, str(error).encode())
    finally:
        os._exit(1)


def _die_with(parent: int) -> None:
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _become_init(steps: Sequence[Sequence[str]], host_name: str, inner: int) -> NoReturn:
    try:
        name = os.fsencode(host_name)
        check(libc.sethostname(name, len(name)), "sethostname")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP | IFF_RUNNING))
        _mount_all(steps)
        if inner >= 0:
            check(libc.setns(inner, CLONE_NEWUSER), "setns")
        else:
            _become_user(USER_ID, 0, 0)
        # The holder is in an outer PID namespace, and has no id here.
        _die_with(0)
        give_up_capabilities()
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        seccomp.install(seccomp.FILTER or b"")
        pause = os.fork()
        if pause == 0:
            os.execve(PAUSE[0], PAUSE, {"PATH": os.defpath, "LANG": "C.UTF-8"})
        while os.wait()[0] != pause:
            continue
    except OSError as error:
        os.write(2, str(error).encode())
    finally:
        os._exit(1)


def _become_user(inside: int, uid: int, gid: int) -> None:
    """Make a user namespace in which this process's user has the id `inside`."""
    check(libc.unshare(CLONE_NEWUSER), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{inside} {uid} 1"), ("gid_map", f"{inside} {gid} 1")):
        control_files.write(f"/proc/self/{name}", text)


def _mount_all(steps: Sequence[Sequence[str]]) -> None:
    root = ""
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    for step in steps:
        match step:
            case ["root", folder]:
                root = folder
                mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755")
            case ["ro-bind" | "ro-bind-try" | "bind" as kind, source, place]:
                if kind != "ro-bind-try" or os.path.exists(source):
                    _bind(source, root + place, MS_RDONLY if kind != "bind" else 0)
            case ["symlink", target, place]:
                os.makedirs(os.path.dirname(root + place), exist_ok=True)
                os.symlink(target, root + place)
            case ["tmpfs", place, size]:
                os.makedirs(root + place, exist_ok=True)
                mount("tmpfs", root + place, "tmpfs", MS_NOSUID | MS_NODEV, f"mode={1777 if int(size) else 755},size={size}")
            case ["proc", place]:
                os.makedirs(root + place)
                mount("proc", root + place, "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
            case ["dev", place]:
                _make_devices(root + place)
            case ["remount-ro", place]:
                mount(None, root + place, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | (0 if place else MS_NODEV))
    os.chdir(root)
    check(libc.pivot_root(b".", b"."), "pivot_root")
    check(libc.umount2(b".", MNT_DETACH), "umount2")
    os.chdir("/")


def _make_devices(folder: str) -> None:
    os.makedirs(folder)
    mount("tmpfs", folder, "tmpfs", MS_NOSUID, "mode=0755")
    for name in DEVICES:
        _bind(f"/dev/{name}", f"{folder}/{name}", None)
    for target, name in DEVICE_LINKS:
        os.symlink(target, f"{folder}/{name}")
    os.mkdir(f"{folder}/pts")
    mount("devpts", f"{folder}/pts", "devpts", MS_NOSUID | MS_NOEXEC, TERMINALS)


def _bind(source: str, target: str, flags: int | None) -> None:
    """Show `source` at `target`, without devices and setuid programs unless `flags` is None, which is for a device."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    elif not os.path.exists(target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_RDONLY | os.O_CLOEXEC, 0o644))
    mount(source, target, None, MS_BIND | MS_REC)
    if flags is not None:
        # Unlike a remount, this keeps the flags that the kernel has locked, and reaches mounts below.
        wanted = struct.pack("=QQQQ", ATTR_NOSUID | ATTR_NODEV | (ATTR_RDONLY if flags & MS_RDONLY else 0), 0, 0, 0)
        done = libc.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, os.fsencode(target), AT_RECURSIVE, wanted, len(wanted))
        check(done, f"mount_setattr {target}")
