"""What the fork server and the supervisors have in common: each serves one socket, and learns when a child has ended.

Rules: the standard library only, one thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import time
from collections.abc import Callable

from workers.cpu import control_files
from workers.cpu.libc import check, libc

PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 15, 36, 38


def prctl(option: int, value: int) -> None:
    """Set a property of this process. Raises `OSError` when the kernel refuses."""
    check(libc.prctl(option, value, 0, 0, 0), f"prctl({option})")


def end_first() -> None:
    """Have the kernel end this process, and what it starts, before anything of ours where the memory of the machine is full."""
    with contextlib.suppress(OSError):
        control_files.write("/proc/self/oom_score_adj", "1000")


class Wakeup:
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

    def wait(self, limit_s: float) -> None:
        """Return once a child has ended, or after `limit_s` seconds."""
        select.select([self.reading], [], [], limit_s)
        self.clear()

    def close(self) -> None:
        """Give the descriptors back, in the child of a fork."""
        signal.set_wakeup_fd(-1)
        os.close(self.reading)
        os.close(self._writing)


def serve(
    channel: socket.socket,
    wakeup: Wakeup,
    reap: Callable[[], float | None],
    answer: Callable[[], bool],
    until: float = float("inf"),
) -> None:
    """Answer what comes over `channel` until `answer` says that this is over, or until a time of the monotonic clock.

    `reap` is called when a child has ended, and once more after the seconds that it returns.
    """
    poller = select.poll()
    poller.register(channel, select.POLLIN)
    poller.register(wakeup.reading, select.POLLIN)
    again_s: float | None = None
    while (left_s := until - time.monotonic()) > 0:
        wait_s = left_s if again_s is None else min(again_s, left_s)
        ready = {descriptor for descriptor, _ in poller.poll(None if wait_s == float("inf") else wait_s * 1000)}
        if wakeup.reading in ready or again_s is not None:
            wakeup.clear()
            again_s = reap()
        if channel.fileno() in ready and not answer():
            return


def rename(name: str) -> None:
    """Have this process listed by `name`, so that no program inside reads where the worker is installed."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    ctypes.memmove(start, name.encode().ljust(end - start, b"\0")[: end - start], end - start)
    libc.prctl(PR_SET_NAME, name.encode(), 0, 0, 0)
