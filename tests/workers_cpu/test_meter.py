"""What a meter makes of the totals that its samples find, on a clock of its own, and how often it samples."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import repeat
from types import SimpleNamespace

import pytest

from workers.cpu.process import tree
from workers.cpu.process.members import Members
from workers.cpu.process.meter import TreeMeter
from workers.cpu.shell import backend
from workers.cpu.shell.backend import SAMPLING_LOAD, Meter


class Scripted(Meter):
    """A meter whose samples find what a test says."""

    longest_s, sample_cost_s = 0.5, 0.0005
    found_s: float | None = 0.0
    busy: bool = False

    def measure(self) -> float | None:
        self.wants_core = self.busy
        return self.found_s


def played(monkeypatch: pytest.MonkeyPatch, totals: list[float | None], busy: Iterable[bool] = repeat(False)) -> Scripted:
    """Return a meter that has found these totals in the background, half a second apart, and whether the command wanted a core."""
    now = [100.0]
    monkeypatch.setattr(backend, "time", SimpleNamespace(monotonic=lambda: now[0]))
    meter = Scripted()
    meter.set_background(True)
    for meter.found_s, meter.busy in zip(totals, busy, strict=False):
        now[0] += 0.5
        meter.sample()
    assert meter.usage is not None
    return meter


def test_a_total_that_falls_does_not_make_a_command_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a command with a full core, whose children end without being waited for, so that what they used is in no count
    meter = played(monkeypatch, [0.5, 1.0, 1.5, 0.0, 0.5, 1.0, 1.5, 0.0])
    # When it is sampled; then it has waited only for what no sample has found
    assert meter.waited_s == pytest.approx(1.0)
    assert (meter.usage.cpu_s, meter.usage.background_cpu_s) == pytest.approx((3.0, 3.0))


def test_what_a_sample_missed_counts_only_for_the_time_that_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a process with many core-seconds that one sample misses; when the next finds it; then it has not used them since
    monkeypatch.setattr(backend, "_CORES", 2)
    meter = played(monkeypatch, [0.5, 900.0, 0.5, 900.5])
    assert meter.usage.background_cpu_s < 3.1


@pytest.mark.parametrize(
    ("totals", "busy", "starved_s"),
    [
        ([0.0, 0.0, 0.0, 0.0], [False, False, False, False], 0.0),  # it sleeps
        ([0.5, 1.0, 1.5, 2.0], [True, True, True, True], 0.0),  # it has a core
        ([0.0, 0.1, 0.2, 0.2], [True, True, True, True], 1.55),  # it wants one; it did so from the middle of the first half second
        ([0.25, 0.5, 0.75, 1.0], [True, False, True, False], 0.0),  # it wants one half of the time, and has it
        ([2.0, 4.0, 4.0, 4.0], [True, True, True, True], 0.75),  # it has several for a second, and then none
    ],
)
def test_a_command_lacks_a_core_where_it_wants_one_and_gets_none(
    monkeypatch: pytest.MonkeyPatch, totals: list[float | None], busy: list[bool], starved_s: float
) -> None:
    monkeypatch.setattr(backend, "_CORES", 4)
    meter = played(monkeypatch, totals, busy)
    # Then it has waited for what it got less, and lacked a core only while it wanted one
    assert (meter.starved_s, meter.starved_s <= meter.waited_s) == (pytest.approx(starved_s), True)


def test_a_sample_that_finds_nothing_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = played(monkeypatch, [0.5, None, 1.5])
    assert meter.usage.cpu_s == pytest.approx(1.5)


@pytest.mark.parametrize(("others", "interval_s"), [(0, 0.5), (90, 0.5), (1000, 5.0)])
def test_samples_of_many_commands_take_a_part_of_a_core(monkeypatch: pytest.MonkeyPatch, others: int, interval_s: float) -> None:
    running: set[Meter] = {Scripted() for _ in range(others)}
    monkeypatch.setattr(Meter, "running", running)
    meter = Scripted()
    intervals = [meter.next_interval_s() for _ in range(8)]
    assert intervals == sorted(intervals)
    assert (intervals[0], intervals[-1]) == (0.02, interval_s)
    assert others * meter.sample_cost_s / interval_s <= SAMPLING_LOAD


@dataclass(frozen=True, slots=True)
class EndingMembers(Members):
    """A shell, which is this process, and a child of it that ends as soon as processes have been looked for."""

    ending: subprocess.Popen[bytes] | None = None

    def with_zombies(self, spared: Collection[tree.Identity]) -> list[tree.Process]:
        found = [process for process in [tree.read_process(self.shell)] if process is not None]
        assert self.ending is not None
        self.ending.kill()
        self.ending.wait()
        return found


def test_what_ends_between_two_looks_is_in_no_count() -> None:
    # Given a process of an earlier command that has burnt 0.5 s
    burn = "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\ntime.sleep(600)"
    burnt = subprocess.Popen([sys.executable, "-S", "-c", burn], stdout=subprocess.PIPE)
    supervisor = subprocess.Popen(["sleep", "600"])
    try:
        assert burnt.stdout is not None and burnt.stdout.readline()
        process = tree.read_process(burnt.pid)
        assert process is not None
        meter = TreeMeter(EndingMembers(supervisor.pid, os.getpid(), burnt), {process.identity})
        # When the shell waits for it between a sample's look at the shell and its look at the process
        totals = [meter.measure() for _ in range(2)]
    finally:
        for child in (burnt, supervisor):
            child.kill()
            child.communicate()
    # Then no sample lacks what that has used: the next one would take it for the command's
    assert min(totals) > -0.1
