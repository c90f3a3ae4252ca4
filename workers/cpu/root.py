"""Files below another root folder, opened from outside as their user would open them.

The kernel resolves the path with that folder as its root (openat2, RESOLVE_IN_ROOT; Linux 5.6), so no link and no `..` leads out, also not
one that changes meanwhile. Files are opened with the user and group of somebody else (setfsuid(2)), and with none of the worker's further
groups. All of this is for one thread alone.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from workers.cpu.libc import CAPABILITY_VERSION_3, check, libc

SYS_OPENAT2 = 437
SYS_SETGROUPS = {"x86_64": 116, "aarch64": 159}.get(os.uname().machine)
RESOLVE_NO_MAGICLINKS, RESOLVE_IN_ROOT = 0x02, 0x10


class _How(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def open_in_root(root: int, path: str, flags: int, mode: int = 0) -> int:
    """Open `path` with the folder `root` as the root of everything. Raises `OSError`."""
    how = _How(flags, mode, RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS)
    descriptor: int = libc.syscall(SYS_OPENAT2, root, os.fsencode(path), ctypes.byref(how), ctypes.sizeof(how))
    if descriptor < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return descriptor


@contextmanager
def as_user(uid: int, gid: int) -> Iterator[None]:
    """Let this thread's files be opened as a user would. Raises `PermissionError`."""
    before, groups = (libc.setfsuid(-1), libc.setfsgid(-1)), os.getgroups()
    has_more = SYS_SETGROUPS is not None and bool(groups) and (uid, gid) != before
    try:
        if has_more:
            _set_groups([])
        _become(libc.setfsgid, gid)
        _become(libc.setfsuid, uid)
        yield
    finally:
        libc.setfsuid(before[0])
        libc.setfsgid(before[1])
        if has_more:
            _set_groups(groups)


@contextmanager
def without_capabilities() -> Iterator[None]:
    """Let this thread do what its user may, also where that is root. Raises `OSError`."""
    header, before = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    check(libc.capget(header, before))
    none = (ctypes.c_uint32 * 6)(*before)
    none[0] = none[3] = 0  # the effective set, in two halves
    check(libc.capset(header, none))
    try:
        yield
    finally:
        check(libc.capset(header, before))


def _become(set_id: Callable[[int], int], wanted: int) -> None:
    """Take on a user or group for files. The calls never fail; they tell what was in force, which says whether they worked."""
    set_id(wanted)
    if set_id(wanted) != wanted:
        raise PermissionError("files cannot be opened as another user: CAP_SETUID or CAP_SETGID is missing")


def _set_groups(groups: Sequence[int]) -> None:
    """Set the supplementary groups of this thread; the C library's function would set those of all threads. Raises `PermissionError`."""
    check(libc.syscall(SYS_SETGROUPS, len(groups), (ctypes.c_uint32 * len(groups))(*groups)), "setgroups")
