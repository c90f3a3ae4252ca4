"""Calls of the C library that Python has no function for, and their errors.

Rules: the standard library only; the fork server and the supervisors import this file.
"""

from __future__ import annotations

import ctypes
import os

CAPABILITY_VERSION_3 = 0x20080522

libc = ctypes.CDLL(None, use_errno=True)


def check(answer: int, call: str = "") -> int:
    """Return the answer of a call. Raises `OSError` where it is below 0, which `call` names."""
    if answer < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}" if call else os.strerror(number))
    return answer
