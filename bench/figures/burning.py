"""Figures of the stand-in for a command (`app/replay/burn.py`): what it uses beyond what it was asked for, what a second core is worth."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import app.replay.burn as program
from bench.figures.registry import figure
from bench.tools import NotMeasured, until, wait_s
from workers.cpu.process import tree

HERE = sorted(os.sched_getaffinity(0))
ONE, TWO = set(HERE[:1]), set(HERE[:2])
MOVES = 25


@figure("ms")
def burn_beyond_asked() -> float:
    """Return CPU time of burning 0.3 s on four processes, beyond that and what the processes take by themselves."""
    alone_s = min(_used_s("0.001", "4", "0.5") for _ in range(3))
    return 1e3 * (_used_s("0.3", "4", "0.5") - 0.3 - alone_s)


@figure("ms")
def burn_waiting() -> float:
    """Return CPU time of half a second of work that waits for four fifths of it, beyond the 100 ms asked for."""
    return 1e3 * (_used_s("0.5", "1", "1", "1", "0.2") - 0.1)


@figure("×")
def burn_second_core() -> float:
    """Return time of work that gets a second core as it starts, over that on one core, median of 5."""
    _needs_two_cores()
    return median(wait_s(lambda: _burnt("0.4", TWO)) / wait_s(lambda: _burnt("0.4", ONE)) for _ in range(5))


@figure("ms")
def burn_moved() -> float:
    """Return CPU time of burning 0.5 s while the work is moved 25 times between one core and two, beyond that."""
    _needs_two_cores()
    before = children_s()
    with burning(ONE, "0.5", "1", "1", "2") as shell:
        for move in range(MOVES):
            if shell.poll() is not None:
                break
            pin(shell.pid, ONE if move % 2 else TWO)
            time.sleep(0.02)
        _ended(shell)
    return 1e3 * (children_s() - before - 0.5)


def _needs_two_cores() -> None:
    if len(HERE) < 2:
        raise NotMeasured("needs two cores")


def _burnt(work_s: str, then: set[int]) -> None:
    """Burn work that starts on one core and is moved to `then`."""
    with burning(ONE, work_s, "1", "1", "2") as shell:
        until(lambda: tree.descendants(shell.pid))
        pin(shell.pid, then)
        _ended(shell)


@contextmanager
def burning(cores: set[int], *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Give a shell, held to `cores`, whose only child is the program."""
    words = " ".join(_command(*arguments))
    shell = subprocess.Popen(["/bin/sh", "-c", f"{words}; exit $?"], preexec_fn=lambda: os.sched_setaffinity(0, cores))
    try:
        yield shell
    finally:
        for process in tree.descendants(shell.pid):
            tree.send(process, 9)
        shell.kill()
        shell.wait()


def pin(shell: int, cores: set[int]) -> None:
    """Hold every thread below a shell to `cores`."""

    def scan() -> tuple[list[int], bool]:
        found, is_all = tree.settled(shell)
        return [thread for process in found for thread in tree.threads_of(process)], is_all

    tree.place(scan, list, cores)


def _ended(shell: subprocess.Popen[bytes]) -> None:
    if (code := shell.wait(60)) != 0:
        raise NotMeasured(f"the program ended with {code}")


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-S", "-E", str(Path(program.__file__)), *arguments]


def _used_s(*arguments: str) -> float:
    before = children_s()
    subprocess.run(_command(*arguments), check=True)
    return children_s() - before


def children_s() -> float:
    """Return the CPU time of the children that this process has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
