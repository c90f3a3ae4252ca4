"""Process trees read from /proc, and what is done to a whole tree: count, pin, park.

Rules: the standard library only, no state, no threads; the keeper process imports this file too. Every process may
vanish between two reads, so a missing process is never an error here. A process is identified by its id together
with its start time, because ids are used again.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Collection
from dataclasses import dataclass

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
HAS_CHILDREN_FILES = os.path.exists("/proc/thread-self/children")

Identity = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Process:
    """One line of /proc/<pid>/stat: `cpu_s` includes `reaped_s`, that of the children it has waited for; `rss_bytes` does not."""

    pid: int
    parent: int
    state: str
    start: int
    cpu_s: float
    rss_bytes: int
    reaped_s: float = 0.0

    @property
    def identity(self) -> Identity:
        """Return what tells this process from a later one of the same id."""
        return (self.pid, self.start)


def read_process(pid: int) -> Process | None:
    """Return what /proc says of `pid`, or None when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            line = file.read(4096)
    except OSError:
        return None
    # The name in parentheses may hold spaces and parentheses: the fields start behind the last one.
    fields = line[line.rfind(b")") + 2 :].split()
    if len(fields) < 22:
        return None
    own_s, reaped_s = (int(fields[11]) + int(fields[12])) / TICKS_PER_S, (int(fields[13]) + int(fields[14])) / TICKS_PER_S
    return Process(pid, int(fields[1]), chr(fields[0][0]), int(fields[19]), own_s + reaped_s, int(fields[21]) * PAGE_BYTES, reaped_s)


def threads(pid: int) -> list[int]:
    """Return the thread ids of a process, none when it is gone."""
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def children(pid: int) -> list[int]:
    """Return the ids of the direct children of a process."""
    if not HAS_CHILDREN_FILES:
        return _children_by_scan(pid)
    found: list[int] = []
    for thread in threads(pid):
        try:
            with open(f"/proc/{pid}/task/{thread}/children", "rb", buffering=0) as file:
                found.extend(int(child) for child in file.read(1 << 20).split())
        except OSError:
            continue
    return found


def _children_by_scan(pid: int) -> list[int]:
    """Find children on kernels without CONFIG_PROC_CHILDREN, by reading every process."""
    every = (read_process(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return [process.pid for process in every if process is not None and process.parent == pid]


def descendants(root: int, spared: Collection[Identity] = ()) -> list[Process]:
    """Return the living processes below `root`, parents first, without `spared` ones and what is below those."""
    found: list[Process] = []
    seen = {root}
    waiting = [root]
    while waiting:
        for pid in children(waiting.pop(0)):
            if pid in seen:
                continue
            seen.add(pid)
            process = read_process(pid)
            if process is None or process.identity in spared:
                continue
            waiting.append(pid)
            if is_alive(process):
                found.append(process)
    return found


def is_alive(process: Process) -> bool:
    """Return False for a zombie; one whose first thread alone has ended still lives."""
    return process.state not in "ZX" or len(threads(process.pid)) > 1


def send(process: Process, number: int) -> None:
    """Send a signal to this very process, never to a later one of the same id."""
    try:
        handle = os.pidfd_open(process.pid)
    except OSError:
        return
    try:
        current = read_process(process.pid)
        if current is not None and current.start == process.start:
            signal.pidfd_send_signal(handle, number)
    except (ProcessLookupError, PermissionError):
        return
    finally:
        os.close(handle)


def pin(root: int, cores: Collection[int]) -> None:
    """Hold every thread below `root` to `cores`."""
    _each_thread(root, 0, lambda thread: os.sched_setaffinity(thread, cores))


def park(root: int, spared: int, cores: Collection[int]) -> None:
    """Leave every thread below `root`, but not the process `spared` itself, only time that nobody else wants.

    That is SCHED_IDLE on any of `cores`; children inherit both.
    """

    def idle(thread: int) -> None:
        os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
        os.sched_setaffinity(thread, cores)

    _each_thread(root, spared, idle)


def unpark(root: int) -> None:
    """Give every thread below `root` ordinary time again, where the kernel allows it.

    Leaving SCHED_IDLE takes CAP_SYS_NICE or an RLIMIT_NICE of 20; without it they stay idle-class: slower than the
    command beside them on a full core, unhindered on a free one.
    """

    def restore(thread: int) -> None:
        if os.sched_getscheduler(thread) == os.SCHED_IDLE:
            os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))

    _each_thread(root, 0, restore)


def _each_thread(root: int, spared: int, action: Callable[[int], None]) -> None:
    """Apply `action` to the threads below `root`, walking again until a walk finds none that it was not applied to.

    Masks and policies are inherited from the creator, so whatever appears between two walks is found by the next.
    """
    met: set[int] = set()
    while True:
        below = (process.pid for process in descendants(root) if process.pid != spared)
        fresh = [thread for pid in below for thread in threads(pid) if thread not in met]
        if not fresh:
            return
        for thread in fresh:
            met.add(thread)
            with contextlib.suppress(OSError):
                action(thread)
