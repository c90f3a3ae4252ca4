"""Calls of the C library that Python has no function for, and their errors.

Rules: the standard library only; the fork server and the supervisors import this file.
"""

from __future__ import annotations

import ctypes
import os

CAPABILITY_VERSION_3 = 0x20080522
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18

libc = ctypes.CDLL(None, use_errno=True)


def check(answer: int, call: str = "") -> int:
    """Return the answer of a call. Raises `OSError` where it is below 0, which `call` names."""
    if answer < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}" if call else os.strerror(number))
    return answer


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """Mount a file system of a kind at `target`, or change what is there. Raises `OSError`."""
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind)]
    done = libc.mount(*words, ctypes.c_ulong(flags), None if data is None else os.fsencode(data))
    check(done, f"mount {target}")
