"""The stand-in for a command follows its cores while it runs, and does the same work all the same."""

from __future__ import annotations

import subprocess
import time

import pytest

from bench.figures.burning import HERE, ONE, TWO, burning, children_s, pin
from tests.workers_cpu.support import until
from workers.cpu.process import tree

needs_two_cores = pytest.mark.skipif(len(HERE) < 2, reason="growing takes two cores")


MOVES = 25
"""Most moves of work between cores."""


def processes(shell: subprocess.Popen[bytes]) -> int:
    return len(tree.descendants(shell.pid))


def burns(shell: subprocess.Popen[bytes]) -> bool:
    """Return whether the program has come to its work."""
    return any(process.cpu_s > 0.03 for process in tree.descendants(shell.pid))


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
    before = children_s()
    with burning(ONE, "0.5", "1", "1", "2") as shell:
        for move in range(MOVES):
            if shell.poll() is not None:
                break
            pin(shell.pid, ONE if move % 2 else TWO)
            time.sleep(0.02)
        # When it has ended; then all is well
        assert shell.wait(60) == 0
    # And as much CPU time was used at least
    assert children_s() - before >= 0.5


@needs_two_cores
def test_a_helper_that_is_killed_makes_it_fail() -> None:
    # Given work on two processes
    with burning(TWO, "2", "2") as shell:
        assert until(lambda: processes(shell) == 2)
        # When the helper is killed; then the program says so at its end
        tree.send(tree.descendants(shell.pid)[-1], 9)
        assert shell.wait(60) == 1
