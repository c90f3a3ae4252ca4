"""The stand-in for a command follows its cores while it runs, and does the same work all the same."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import app.replay.burn as burn_module
from tests.workers_cpu.support import until
from workers.cpu.process import tree

HERE = sorted(os.sched_getaffinity(0))
ONE, TWO = {HERE[0]}, set(HERE[:2])
needs_two_cores = pytest.mark.skipif(len(HERE) < 2, reason="growing takes two cores")


MOVES = 25
"""Most moves of work between cores."""


@contextmanager
def burning(cores: set[int], *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Give a shell, held to `cores`, whose only child is the program."""
    words = " ".join((sys.executable, "-S", "-E", str(Path(burn_module.__file__)), *arguments))
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

    tree.place(scan, list, lambda thread: os.sched_setaffinity(thread, cores) is None)


def processes(shell: subprocess.Popen[bytes]) -> int:
    return len(tree.descendants(shell.pid))


def burns(shell: subprocess.Popen[bytes]) -> bool:
    """Return whether the program has come to its work."""
    return any(process.cpu_s > 0.03 for process in tree.descendants(shell.pid))


def used_s() -> float:
    """Return the CPU time of the children that this process has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@needs_two_cores
def test_there_are_as_many_processes_as_cores_up_to_the_most() -> None:
    # Given endless work on one core
    with burning(ONE, "300", "1", "1", "2") as shell:
        assert until(lambda: burns(shell))
        assert processes(shell) == 1
        # When it gets two; then there are two processes
        pin(shell.pid, TWO)
        assert until(lambda: processes(shell) == 2)
        # When one is taken away; then there is one
        pin(shell.pid, ONE)
        assert until(lambda: processes(shell) == 1)
        # When it comes back; then there are two again
        pin(shell.pid, TWO)
        assert until(lambda: processes(shell) == 2)


@needs_two_cores
def test_more_cores_are_no_use_beyond_the_most() -> None:
    # Given work for one process at most; when it gets two cores; then it stays one, to its end
    with burning(ONE, "2", "1", "1", "1") as shell:
        assert until(lambda: burns(shell))
        pin(shell.pid, TWO)
        seen = set()
        while shell.poll() is None:
            seen.add(processes(shell))
            time.sleep(0.002)
        assert seen <= {0, 1}


@needs_two_cores
def test_cores_that_came_before_the_start_are_used() -> None:
    # Given work that was given one core and finds two; when the caller says that two are the most; then it uses both
    with burning(TWO, "300", "1", "1", "2") as shell:
        assert until(lambda: processes(shell) == 2)
    # When the caller says nothing; then it does as it was given
    with burning(TWO, "300", "1") as shell:
        assert until(lambda: burns(shell))
        assert processes(shell) == 1


@needs_two_cores
def test_growing_and_shrinking_leave_the_work_as_it_is() -> None:
    # Given work that is moved again and again between one core and two
    before = used_s()
    with burning(ONE, "0.5", "1", "1", "2") as shell:
        for move in range(MOVES):
            if shell.poll() is not None:
                break
            pin(shell.pid, ONE if move % 2 else TWO)
            time.sleep(0.02)
        # When it has ended; then all is well
        assert shell.wait(60) == 0
    # And as much CPU time was used at least
    assert used_s() - before >= 0.5


@needs_two_cores
def test_a_helper_that_is_killed_makes_it_fail() -> None:
    # Given work on two processes
    with burning(TWO, "2", "2") as shell:
        assert until(lambda: processes(shell) == 2)
        # When the helper is killed; then the program says so at its end
        tree.send(tree.descendants(shell.pid)[-1], 9)
        assert shell.wait(60) == 1
