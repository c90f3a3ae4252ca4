"""Process trees read from /proc, and what is done to a whole tree: count, signal, place.

Rules: the standard library only, no state, no threads; the supervisor process imports this file too. Every process may
vanish between two reads, so a missing process is never an error here. A process is identified by its id together
with its start time, because ids are used again.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from workers.cpu.control_files import PAGE_BYTES, read_bytes

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PF_EXITING = 0x4  # linux/sched.h: set before a dying process closes its files, long before it is a zombie
HAS_CHILDREN_FILES = os.path.exists("/proc/thread-self/children")

WALKS = 3
THREADS_READ = 64
PLACE_LIMIT_S, SWEEP_S = 0.005, 0.002

Identity = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Process:
    """One line of /proc/<pid>/stat: `cpu_s` includes `reaped_s`, that of the children it has waited for; `rss_bytes` does not.

    One that `is_dying` has begun to, or waits to be reaped.
    """

    pid: int
    parent: int
    state: str
    start: int
    cpu_s: float
    rss_bytes: int
    reaped_s: float = 0.0
    thread_count: int = 0
    is_dying: bool = False

    @property
    def identity(self) -> Identity:
        """Return what tells this process from a later one of the same id."""
        return (self.pid, self.start)


def _status(pid: int | str) -> list[bytes]:
    """Return the fields of /proc/<pid>/stat from the state on, or none when the process is gone. `<id>/task/<id>` names a thread."""
    try:
        line = read_bytes(f"/proc/{pid}/stat")
    except OSError:
        return []
    # The name in parentheses may hold spaces and parentheses: the fields start behind the last one.
    fields = line[line.rfind(b")") + 2 :].split()
    return fields if len(fields) >= 22 else []


def read_process(pid: int) -> Process | None:
    """Return what /proc says of `pid`, or None when it is gone."""
    fields = _status(pid)
    if not fields:
        return None
    own_s, reaped_s = (int(fields[11]) + int(fields[12])) / TICKS_PER_S, (int(fields[13]) + int(fields[14])) / TICKS_PER_S
    parent, start, rss_bytes, thread_count = int(fields[1]), int(fields[19]), int(fields[21]) * PAGE_BYTES, int(fields[17])
    is_dying = bool(int(fields[6]) & PF_EXITING) or fields[0] in b"ZX"
    return Process(pid, parent, chr(fields[0][0]), start, own_s + reaped_s, rss_bytes, reaped_s, thread_count, is_dying)


def threads(pid: int) -> list[int]:
    """Return the thread ids of a process, none when it is gone."""
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def children(pid: int, thread_count: int = 0) -> list[int]:
    """Return the ids of the direct children of a process, which is known to have `thread_count` threads, or 0: not known."""
    if not HAS_CHILDREN_FILES:
        return _children_by_scan(pid)
    found: list[int] = []
    for thread in [pid] if thread_count == 1 else threads(pid):
        try:
            found.extend(map(int, read_bytes(f"/proc/{pid}/task/{thread}/children").split()))
        except OSError:
            continue
    return found


def _children_by_scan(pid: int) -> list[int]:
    """Find children on kernels without CONFIG_PROC_CHILDREN, by reading every process."""
    every = (read_process(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return [process.pid for process in every if process is not None and process.parent == pid]


def descendants(root: int) -> list[Process]:
    """Return the living processes below `root`, parents first."""
    return list(filter(is_alive, with_zombies(root)))


def with_zombies(root: int, spared: Collection[Identity] = ()) -> list[Process]:
    """Return the same with zombies. `spared` processes and all below them are left out."""
    return _walk(root, spared)[0]


def settled(root: int, spared: Collection[Identity] = ()) -> tuple[list[Process], bool]:
    """Return the living processes below `root` as `descendants` does, and whether that surely is all of them.

    The children of a dying process may go to a process that the walk has passed, and then the walk misses them. So the walk is made
    again until no process dies during it, apart from zombies that were known before.
    """
    dead: set[int] = set()
    for _ in range(WALKS):
        found, fading = _walk(root, spared)
        if fading <= dead:
            return list(filter(is_alive, found)), True
        # Only a zombie has handed its children on.
        dead.update(pid for pid in fading if _status(pid)[:1] in ([], [b"Z"]))
    return list(filter(is_alive, found)), False


def _walk(root: int, spared: Collection[Identity]) -> tuple[list[Process], set[int]]:
    """Return the processes below `root`, and the ids of those that were met dead, or were dying once their children were read."""
    found: list[Process] = []
    fading: set[int] = set()
    waiting, seen = children(root), {root}
    for pid in waiting:
        if pid in seen:
            continue
        seen.add(pid)
        below = children(pid, 1)
        process = read_process(pid)
        if process is not None and process.thread_count > 1 and HAS_CHILDREN_FILES:
            below = children(pid)
            process = read_process(pid)
        if process is None or process.is_dying:
            fading.add(pid)
        if process is None or process.identity in spared:
            continue
        waiting += below
        found.append(process)
    return found, fading


def wants_core(process: Process) -> bool:
    """Return whether a thread of a process uses a core or waits for one, or cannot go on in the kernel, as the load average counts it.

    In the kernel (state D) it waits for a disk, or for a lock such as that on the mappings of the C library, which every start and end
    of a program takes. Whoever holds the lock may itself have no core. Of very many threads only the first are looked at.
    """
    if process.state in "RD" or process.thread_count <= 1:
        return process.state in "RD"
    some = itertools.islice(threads(process.pid), THREADS_READ)
    return any(_status(f"{process.pid}/task/{thread}")[:1] in ([b"R"], [b"D"]) for thread in some)


def is_alive(process: Process) -> bool:
    """Return False for a zombie; one whose first thread alone has ended still lives."""
    return process.state not in "ZX" or len(threads(process.pid)) > 1


def send(process: Process, number: int) -> None:
    """Send a signal to this very process, never to a later one of the same id."""
    with contextlib.suppress(ProcessLookupError, PermissionError), _handle(process) as handle:
        if handle is not None:
            signal.pidfd_send_signal(handle, number)


def await_end(process: Process, limit_s: float) -> None:
    """Wait until this very process has ended, or for `limit_s` seconds."""
    with _handle(process) as handle:
        if handle is not None:
            poller = select.poll()
            poller.register(handle, select.POLLIN)
            poller.poll(limit_s * 1000)


@contextlib.contextmanager
def _handle(process: Process) -> Iterator[int | None]:
    """Give a descriptor of this very process, None where it has gone."""
    try:
        handle = os.pidfd_open(process.pid)
    except OSError:
        yield None
        return
    try:
        current = read_process(process.pid)
        yield handle if current is not None and current.start == process.start else None
    finally:
        os.close(handle)


def command_line(pid: int) -> bytes:
    """Return the arguments that a process was started with, each ended by NUL; none when it is gone."""
    try:
        return read_bytes(f"/proc/{pid}/cmdline")
    except OSError:
        return b""


def now_ticks() -> int:
    """Return the time as `Process.start` counts it."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * TICKS_PER_S)


def handles(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal."""
    return b"SigCgt:" in _sets_with(pid, number)


def blocks(pid: int, number: int) -> tuple[bool, bool]:
    """Return whether a process blocks a signal, as it does while its handler runs, and whether one waits to be delivered to it."""
    sets = _sets_with(pid, number)
    return b"SigBlk:" in sets, b"SigPnd:" in sets or b"ShdPnd:" in sets


def _sets_with(pid: int, number: int) -> set[bytes]:
    """Return the names of those sets of signals of a process that have this one."""
    try:
        lines = read_bytes(f"/proc/{pid}/status").splitlines()
    except OSError:
        return set()
    sets = (line.split() for line in lines if line.startswith((b"Sig", b"Shd")) and not line.startswith(b"SigQ:"))
    return {name for name, signals in sets if int(signals, 16) >> (number - 1) & 1}


def inner_pid(pid: int) -> int:
    """Return the id of a process in its own PID namespace; 0 when it is gone."""
    try:
        lines = read_bytes(f"/proc/{pid}/status").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[-1]) for line in lines if line.startswith(b"NSpid:")), pid)


def threads_of(process: Process) -> list[int]:
    """Return the ids of the threads of a process; of one that had a single thread no file is read."""
    return [process.pid] if process.thread_count == 1 else threads(process.pid)


def place(scan: Callable[[], tuple[Iterable[int], bool]], nearest: Callable[[], Iterable[int]], cores: Iterable[int]) -> None:
    """Hold all threads to `cores`, with two scans at least, and for no longer than `PLACE_LIMIT_S` where these take less.

    `scan` returns threads and whether that surely is all. Masks are inherited. So all is done once a complete scan finds nothing new
    to pin: later threads start in place. One whose start was under way may come into sight afterwards; the next sample of the command
    finds it. A process that forks and ends faster than a scan takes is met by none. Its successors become children of the process that
    adopts orphans. While scans are incomplete, these children, `nearest`, are therefore pinned again and again.
    """
    wanted, met = frozenset(cores), set[int]()
    end = time.monotonic() + PLACE_LIMIT_S
    for scans in itertools.count(1):
        found, is_all = scan()
        was_in_place = True
        for each in found:
            if each not in met:
                met.add(each)
                was_in_place &= not _pin(each, wanted)
        if (is_all and was_in_place) or (scans > 1 and time.monotonic() > end):
            return
        sweep_end = min(end, time.monotonic() + SWEEP_S)
        while not is_all and time.monotonic() < sweep_end:
            for each in nearest():
                _pin(each, wanted)


def _pin(thread: int, cores: frozenset[int]) -> bool:
    """Hold a thread to `cores`; return whether it lives and was not."""
    with contextlib.suppress(OSError):
        if os.sched_getaffinity(thread) != cores:
            os.sched_setaffinity(thread, cores)
            return True
    return False
