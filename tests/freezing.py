"""Processes that stand still: SIGSTOP is sent at once, but a process with several threads stops a moment later, and SIGCONT undoes it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tests.needed import needed

_PTRACE_ATTACH, _PTRACE_DETACH, _WALL = 16, 17, 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)

FREEZE_S = 30.0
"""How long a process may take to stop; seconds."""


def freeze(pid: int) -> None:
    """Stop a process, and return when none of its threads runs any more. Raises ProcessLookupError if it has ended."""
    os.kill(pid, signal.SIGSTOP)
    over_at = time.monotonic() + FREEZE_S
    while not all(_state(task) in "TZX" for task in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < over_at, f"process {pid} does not stop"
        time.sleep(0.001)


@contextlib.contextmanager
def held(pid: int) -> Iterator[None]:
    """Hold a process with one thread still whatever signal it is sent but SIGKILL. To the kernel this is a debugger that does nothing.

    Skips the test where only root may do so: a supervisor hides from others, where it makes the view of its environment itself.
    """
    stands, over, refused = threading.Event(), threading.Event(), list[str]()

    def trace() -> None:
        try:
            _ptrace(_PTRACE_ATTACH, pid)
        except PermissionError as error:
            refused.append(f"process {pid} cannot be traced: {error}")
            stands.set()
            return
        os.waitpid(pid, _WALL)
        stands.set()
        while not over.wait(0.01):
            if os.waitpid(pid, os.WNOHANG | _WALL) != (0, 0):
                return
        try:
            _ptrace(_PTRACE_DETACH, pid)
        except ProcessLookupError:  # it was killed a moment ago
            os.waitpid(pid, _WALL)

    # All calls about a traced process must come from the thread that has begun it.
    tracer = threading.Thread(target=trace)
    tracer.start()
    try:
        assert stands.wait(FREEZE_S), f"process {pid} does not stop"
        needed("".join(refused))
        yield
    finally:
        over.set()
        tracer.join()


def _ptrace(request: int, pid: int) -> None:
    if _libc.ptrace(request, pid, None, None):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _state(task: Path) -> str:
    """Return the letter of a thread's state; a thread that has ended is dead."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
