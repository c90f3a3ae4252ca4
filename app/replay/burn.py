"""Burn a known amount of CPU, and hold a known amount of memory, as a command that was recorded did.

    python -S -E burn.py WORK_S DOP [PARALLEL_FRACTION [MOST [BUSY [MEMORY_MB RESIDENT_MB]]]]

It also runs as `python -m app.replay.burn …`.

It stands in for a command when a trace without commands is replayed, and it is an elastic program. By Amdahl's law, the
share `1 - PARALLEL_FRACTION` of WORK_S runs on one process first. The rest lies in a shared counter as small chunks, from
which every process takes one after the other. How many processes there are:

* DOP at the start; with MOST, which says that the caller holds the program to cores that may already have changed, more
  if there are more cores;
* once the cores that it may run on are others than at the start, as many as those, and at most MOST.

Each process reads its affinity between two chunks. Work is measured by the CPU time of each process, so on a core that
is shared it takes longer, and never does less. BUSY, by default 1, is the part of the work that needs a core. In the rest
of the time the process sleeps, so that bursts and pauses alternate.

MEMORY_MB is what the environment holds in all while it works, RESIDENT_MB what it holds afterwards: that stays with a process in the
background, the keeper. Memory is held only where the node bounds it. So no replay fills the memory of a machine that bounds none.

This file is also run by its path: the standard library only, and no import that is slow.
"""

from __future__ import annotations

import mmap
import os
import select
import signal
import sys
import time

USAGE = "usage: burn.py WORK_S DOP [PARALLEL_FRACTION [MOST [BUSY [MEMORY_MB RESIDENT_MB]]]]"
MEMORY_ENFORCED = "TANGRAM_MEMORY_ENFORCED"
KEEPER = os.path.expanduser("~/.tangram-keeper")
OWN_MB, OWN_IDLE_MB = 10, 5
"""What an environment holds beside, as measured: its shell and what watches over it; while it works, this interpreter too."""

LEAST_CHANGE_MB = 4
STEPS_BETWEEN_CHECKS = 2_000
CHUNK_S = 0.01
LONGEST_CHUNK_S = 0.1
MOST_CHUNKS = 1_000_000
UNLIMITED = sys.maxsize


def burn(until_s: float) -> None:
    """Use CPU until this thread has used `until_s` seconds of it."""
    value = 1
    while time.thread_time() < until_s:
        for _ in range(STEPS_BETWEEN_CHECKS):
            value = (value * 1_103_515_245 + 12_345) & 0x7FFFFFFF


def chunks(work_s: float, busy: float) -> int:
    """Return the number of chunks. Each holds a burst of `CHUNK_S` and its pause, together at most `LONGEST_CHUNK_S`."""
    chunk_s = LONGEST_CHUNK_S if busy * LONGEST_CHUNK_S <= CHUNK_S else CHUNK_S / busy
    return min(MOST_CHUNKS, int(work_s / chunk_s) + 1)


class Shift:
    """The work of one process, which burns CPU for the part `busy` of it and sleeps for the rest."""

    def __init__(self, busy: float) -> None:
        self._busy = busy
        self._due_s = time.thread_time()

    def work(self, work_s: float) -> None:
        """Do that much work."""
        # What one chunk took too long is taken off the next, so that the sum is right.
        self._due_s += work_s * self._busy
        burn(self._due_s)
        if self._busy < 1.0:
            time.sleep(work_s * (1.0 - self._busy))


class Crew:
    """The processes that share `work_s` seconds of work: the one that makes it, numbered 0, and its helpers."""

    def __init__(self, work_s: float, dop: int, most: int | None, busy: float = 1.0) -> None:
        count = chunks(work_s, busy)
        self._chunk_s = work_s / count
        self._busy = busy
        # As a semaphore, its every read takes 1, in one step also between processes.
        self._chunks = os.eventfd(count, os.EFD_SEMAPHORE | os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._most = UNLIMITED if most is None else most
        self._cores = os.sched_getaffinity(0)
        self._start = dop if most is None else max(dop, min(len(self._cores), most))
        self._leader = os.getpid()
        self._helpers: dict[int, int] = {}
        self._intact = True

    def work(self) -> bool:
        """Do the work; return False when a helper was killed."""
        self._take_chunks(0)
        for number in list(self._helpers):
            self._reap(number, 0)
        return self._intact

    def _wanted(self) -> int:
        cores = os.sched_getaffinity(0)
        return self._start if cores == self._cores else min(len(cores), self._most)

    def _take_chunks(self, number: int) -> None:
        """Take chunks as long as there are any and this process is wanted."""
        shift = Shift(self._busy)
        while True:
            wanted = self._wanted()
            if number == 0:
                self._call(wanted)
            elif number >= wanted or os.getppid() != self._leader:
                return
            try:
                os.eventfd_read(self._chunks)
            except BlockingIOError:
                return
            shift.work(self._chunk_s)

    def _call(self, wanted: int) -> None:
        """Fork the helpers that are wanted and not there."""
        for number in range(1, wanted if self._intact else 0):
            if number in self._helpers and not self._reap(number, os.WNOHANG):
                continue
            helper = os.fork()
            if helper == 0:
                self._take_chunks(number)
                os._exit(0)
            self._helpers[number] = helper

    def _reap(self, number: int, options: int) -> bool:
        """Take note of a helper's end; return whether it has ended."""
        ended, status = os.waitpid(self._helpers[number], options)
        if ended:
            del self._helpers[number]
            self._intact = self._intact and status == 0
        return bool(ended)


def burn_elastic(work_s: float, dop: int, parallel_fraction: float, most: int | None = None, busy: float = 1.0) -> bool:
    """Do `work_s` seconds of work on `dop` processes, or as many as there come to be cores; return False when one was killed.

    A process burns CPU for the part `busy` of its work.
    """
    serial_s, shared_s = work_s * (1.0 - parallel_fraction), work_s * parallel_fraction
    shift, count = Shift(busy), chunks(serial_s, busy)
    for _ in range(count):
        shift.work(serial_s / count)
    return shared_s <= 0 or Crew(shared_s, dop, most, busy).work()


def block_of(size_mb: int) -> mmap.mmap | None:
    """Return memory of this size, every page of it in use; None for nothing."""
    if size_mb <= 0:
        return None
    block = mmap.mmap(-1, size_mb << 20)
    for start in range(0, len(block), mmap.PAGESIZE):
        block[start] = 1
    return block


def kept() -> tuple[int, int]:
    """Return the process that keeps memory of this environment, and how many MB; zeros where there is none."""
    try:
        with open(KEEPER) as file:
            keeper, size_mb = map(int, file.read().split())
        os.kill(keeper, 0)
    except (OSError, ValueError):
        return 0, 0
    return keeper, size_mb


def end(keeper: int) -> None:
    """Kill the keeper, and wait until its memory is free: the environment is never to hold both what was kept and what is."""
    try:
        ended = os.pidfd_open(keeper)
        os.kill(keeper, signal.SIGKILL)
    except ProcessLookupError:
        return
    select.select([ended], [], [])
    os.close(ended)


def keep(size_mb: int) -> None:
    """Have so much memory kept, in place of what was."""
    keeper, before_mb = kept()
    if abs(size_mb - before_mb) < LEAST_CHANGE_MB:
        return
    if keeper:
        end(keeper)
    if (block := block_of(size_mb)) is None:
        return
    started = os.fork()  # which has the block, too
    if started:
        with open(KEEPER, "w") as file:
            file.write(f"{started} {size_mb}")
        return
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    while not block.closed:
        signal.pause()


def parse(arguments: list[str]) -> tuple[tuple[float, int, float, int | None, float], tuple[int, int] | None]:
    """Return work in seconds, DoP, parallel fraction, the most processes and the busy part; and MB of memory, meanwhile and afterwards.

    Raises `ValueError` with one clear line.
    """
    if len(arguments) not in (2, 3, 4, 5, 7):
        raise ValueError(USAGE)
    try:
        work_s, dop = float(arguments[0]), int(arguments[1])
        parallel_fraction = float(arguments[2]) if len(arguments) > 2 else 1.0
        most = int(arguments[3]) if len(arguments) > 3 else None
        busy = float(arguments[4]) if len(arguments) > 4 else 1.0
        memory = (int(arguments[5]), int(arguments[6])) if len(arguments) > 5 else None
    except ValueError as error:
        raise ValueError(f"{USAGE}: {error}") from None
    if not 0.0 <= work_s < float("inf"):
        raise ValueError(f"WORK_S must be at least 0 seconds, not {arguments[0]}")
    if dop < 1:
        raise ValueError(f"DOP must be at least 1, not {dop}")
    if not 0.0 <= parallel_fraction <= 1.0:
        raise ValueError(f"PARALLEL_FRACTION must be between 0 and 1, not {arguments[2]}")
    if most is not None and most < dop:
        raise ValueError(f"MOST must be at least DOP, {dop}, not {most}")
    if not 0.0 <= busy <= 1.0:
        raise ValueError(f"BUSY must be between 0 and 1, not {arguments[4]}")
    if memory is not None and min(memory) < 0:
        raise ValueError(f"MEMORY_MB and RESIDENT_MB must be at least 0, not {arguments[5]} and {arguments[6]}")
    return (work_s, dop, parallel_fraction, most, busy), memory


def main(arguments: list[str]) -> int:
    """Burn what the arguments ask for; return the exit code."""
    try:
        work, memory = parse(arguments)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if memory is None or MEMORY_ENFORCED not in os.environ:
        return 0 if burn_elastic(*work) else 1
    memory_mb, resident_mb = memory
    block = block_of(memory_mb - OWN_MB - kept()[1])
    is_whole = burn_elastic(*work)
    if block is not None:
        block.close()
    keep(resident_mb - OWN_IDLE_MB)
    return 0 if is_whole else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
