"""The stand-in for a command uses the CPU time it was asked for, on as many processes as it has cores, while these change."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import psutil
import pytest

import app.replay.burn as burn_module
from app.replay.burn import main, parse
from bench.figures.burning import HERE, ONE, TWO, burning, children_s, pin
from tests.workers_cpu.support import until
from workers.cpu.process import tree

SCRIPT = Path(burn_module.__file__)
MOVES = 25
"""Most moves of work between cores."""

needs_two_cores = pytest.mark.skipif(len(HERE) < 2, reason="growing takes two cores")


@pytest.mark.parametrize(
    ("arguments", "cores", "cpu_s", "least_s"),
    [
        (("0.1", "1"), None, 0.1, 0.0),
        (("0.1", "4", "0.5"), None, 0.1, 0.0),
        (("0.1", "3", "0"), None, 0.1, 0.0),
        # Two processes that share a core take longer, and do not do less.
        (("0.1", "2"), ONE, 0.1, 0.095),
        # Work that mostly waits takes its time, and its part of a core.
        (("0.2", "1", "0", "1", "0.2"), None, 0.04, 0.2),
        (("0.2", "1", "1", "1", "0.2"), None, 0.04, 0.2),
    ],
)
def test_no_work_is_left_out(arguments: tuple[str, ...], cores: set[int] | None, cpu_s: float, least_s: float) -> None:
    used_s, began = children_s(), time.monotonic()
    with burning(cores or set(HERE), *arguments) as shell:
        assert shell.wait(60) == 0
    assert time.monotonic() - began >= least_s
    assert children_s() - used_s >= cpu_s


def processes(shell: subprocess.Popen[bytes]) -> int:
    return len(tree.descendants(shell.pid))


def burns(shell: subprocess.Popen[bytes]) -> bool:
    """Return whether the program has come to its work."""
    return any(process.cpu_s > 0.03 for process in tree.descendants(shell.pid))


@pytest.mark.parametrize(("fraction", "expected"), [("1", 3), ("0", 1)])
def test_only_the_parallel_part_runs_on_as_many_processes_as_the_dop(fraction: str, expected: int) -> None:
    with burning(set(HERE), "300", "3", fraction) as shell:
        assert until(lambda: burns(shell) and processes(shell) >= expected)
        assert processes(shell) == expected


@needs_two_cores
def test_there_are_as_many_processes_as_cores_up_to_the_most() -> None:
    with burning(ONE, "300", "1", "1", "2") as shell:
        assert until(lambda: burns(shell))
        assert processes(shell) == 1
        # When it gets two, loses one and gets it back; then it follows
        for cores in (TWO, ONE, TWO):
            pin(shell.pid, cores)
            assert until(lambda cores=cores: processes(shell) == len(cores))  # type: ignore[misc]


@needs_two_cores
@pytest.mark.parametrize(("most", "expected"), [(("1", "2"), 2), ((), 1)])
def test_cores_that_came_before_the_start_are_used_where_the_caller_says_how_many(most: tuple[str, ...], expected: int) -> None:
    with burning(TWO, "300", "1", *most) as shell:
        assert until(lambda: burns(shell) and processes(shell) >= expected)
        assert processes(shell) == expected


@needs_two_cores
def test_growing_and_shrinking_leave_the_work_as_it_is() -> None:
    # Given work that is moved again and again between one core and two
    before = children_s()
    with burning(ONE, "0.3", "1", "1", "2") as shell:
        for move in range(MOVES):
            if shell.poll() is not None:
                break
            pin(shell.pid, ONE if move % 2 else TWO)
            time.sleep(0.01)
        assert shell.wait(60) == 0
    assert children_s() - before >= 0.3


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """Give a home folder; a process that keeps memory for it ends afterwards."""
    yield tmp_path
    if (keeper := keeper_of(tmp_path)) is not None:
        os.kill(keeper, signal.SIGKILL)


def keeper_of(home: Path) -> int | None:
    """Return the process that keeps memory for a home folder."""
    keepers = [process for process in psutil.process_iter(["cmdline", "environ"]) if str(SCRIPT) in (process.info["cmdline"] or ())]
    return next((process.pid for process in keepers if (process.info["environ"] or {}).get("HOME") == str(home)), None)


MEASURED = """import resource, subprocess, sys
code = subprocess.call(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024)
sys.exit(code)"""


def hold(home: Path, memory_mb: int, resident_mb: int, **variables: str) -> int:
    """Hold memory as an environment of that home folder; return the most that the program held, in MB."""
    # A process counts what it held before it became another program. So it is started by a small one.
    program = [sys.executable, "-S", "-E", str(SCRIPT), "0", "1", "0", "1", "0", str(memory_mb), str(resident_mb)]
    ended = subprocess.run([sys.executable, "-S", "-c", MEASURED, *program], env={"HOME": str(home), **variables}, stdout=subprocess.PIPE)
    assert ended.returncode == 0
    return int(ended.stdout)


def test_memory_is_held_in_all_and_some_of_it_stays(home: Path) -> None:
    bounded = {burn_module.MEMORY_ENFORCED: "1"}
    # Given a program that takes memory, of which some stays
    assert 180 <= hold(home, 200, 100, **bounded) <= 230
    first = keeper_of(home)
    assert first is not None
    # When one needs little more than that; then it takes the difference, and the rest stays with whom it was
    assert hold(home, 120, 102, **bounded) < 60
    assert keeper_of(home) == first
    # And when one leaves nothing, nothing stays from its end on
    hold(home, 120, 0, **bounded)
    assert keeper_of(home) is None


def test_no_memory_is_held_where_nobody_bounds_it(home: Path) -> None:
    assert hold(home, 200, 100) < 60
    assert keeper_of(home) is None


def test_a_helper_that_is_killed_makes_it_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given work on two processes, of which the helper is killed when it comes to it, and the other one waits for that
    this, (end, its_end), calls = os.getpid(), os.pipe(), count()

    def burn(until_s: float) -> None:
        if os.getpid() != this:
            os.kill(os.getpid(), signal.SIGKILL)
        if next(calls) == 1:  # the first one is the part that is not parallel
            os.close(its_end)
            assert os.read(end, 1) == b""

    monkeypatch.setattr(burn_module, "burn", burn)
    assert main(["0.1", "2"]) == 1
    os.close(end)


WRONG = ["", "1", "x 1", "-1 1", "nan 1", "1 0", "1 2 1 1", "1 1 1 x", "1 1 1 1 1.1", "1 1 1 1 1 1", "1 1 1 1 1 1 -1", "1 1 1 1 1 1 1 1"]


@pytest.mark.parametrize("words", WRONG)
def test_bad_arguments_are_refused_in_one_line(words: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse(words.split())
    assert len(str(caught.value).splitlines()) == 1


def test_bad_arguments_end_with_code_2() -> None:
    ended = subprocess.run([sys.executable, "-m", "app.replay.burn", "1", "0"], capture_output=True, cwd=SCRIPT.parents[2])
    assert (ended.returncode, ended.stdout, len(ended.stderr.splitlines())) == (2, b"", 1)
