"""The stand-in for a command uses the CPU time it was asked for, on as many processes."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import app.replay.burn as burn_module
from app.replay.burn import parse
from tests.workers_cpu.support import until

SCRIPT = Path(burn_module.__file__)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-S", "-E", str(SCRIPT), *arguments]


def used_s(*arguments: str) -> float:
    """Return the CPU time of one run."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command(*arguments), check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("arguments", [("0.3", "1"), ("0.3", "2"), ("0.3", "4", "0.5"), ("0.3", "3", "0")])
def test_no_work_is_left_out_at_any_dop(arguments: tuple[str, ...]) -> None:
    # Given the same work at several DoPs, on however many cores; when it is burnt; then as much CPU time is used at least
    assert used_s(*arguments) >= 0.3


def test_a_shared_core_makes_it_take_longer_and_not_do_less() -> None:
    # Given one core for two processes
    core = min(os.sched_getaffinity(0))
    before = time.monotonic()
    # When they burn; then the time that passes is the work, not half of it
    subprocess.run(command("0.3", "2"), check=True, preexec_fn=lambda: os.sched_setaffinity(0, {core}))
    assert time.monotonic() - before >= 0.29


@pytest.mark.parametrize("fraction", ["0", "1"])
def test_work_that_mostly_waits_takes_its_time_and_its_part_of_a_core(fraction: str) -> None:
    # Given work of half a second that needs its core for a fifth of that; when it is done
    before = time.monotonic()
    cpu_s = used_s("0.5", "1", fraction, "1", "0.2")
    # Then it took half a second, and a tenth of a second of CPU
    assert time.monotonic() - before >= 0.5
    assert cpu_s >= 0.1


@pytest.mark.parametrize(("work_s", "fraction", "processes"), [("318.71875", "1", 3), ("318.71875", "0", 1)])
def test_the_parallel_part_runs_on_as_many_processes_as_the_dop(work_s: str, fraction: str, processes: int) -> None:
    # Given work on a DoP of 3, all, most or none of it parallel; when it burns
    burning = subprocess.Popen(command(work_s, "3", fraction))
    try:
        seen = psutil.Process(burning.pid)
        # Then there are as many processes, and with none parallel never more than one
        if processes > 1:
            assert until(lambda: len(seen.children()) == processes - 1)
        else:
            assert until(lambda: seen.cpu_times().user > 0.05)
            assert seen.children() == []
    finally:
        for helper in psutil.Process(burning.pid).children():
            helper.kill()
        burning.kill()
        burning.wait()


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["1"],
        ["x", "1"],
        ["1", "1.5"],
        ["-1", "1"],
        ["nan", "1"],
        ["inf", "1"],
        ["1", "0"],
        ["1", "1", "2"],
        ["1", "2", "1", "1"],
        ["1", "1", "1", "x"],
        ["1", "1", "1", "1", "1.1"],
        ["1", "1", "1", "1", "nan"],
        ["1"] * 6,
    ],
)
def test_bad_arguments_are_refused_in_one_line(arguments: list[str]) -> None:
    # Given wrong arguments; when they are parsed; then there is one line of why
    with pytest.raises(ValueError) as caught:
        parse(arguments)
    assert len(str(caught.value).splitlines()) == 1


def test_bad_arguments_end_with_code_2() -> None:
    # Given wrong arguments; when the script runs as a module; then it ends with 2 and one line on standard error
    ended = subprocess.run([sys.executable, "-m", "app.replay.burn", "1", "0"], capture_output=True, cwd=SCRIPT.parents[2])
    assert (ended.returncode, ended.stdout, len(ended.stderr.splitlines())) == (2, b"", 1)
