"""On which core the threads of a worker run, by what the kernel tells of the cores."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from workers.cpu import busy, home_core
from workers.cpu.busy import core_times
from workers.cpu.home_core import HomeCore, go_anywhere

EVERYWHERE = frozenset(os.sched_getaffinity(0))


class Machine:
    """A machine whose cores were busy for so many hundredths of a second, and where the calling thread may run."""

    def __init__(self, stat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._stat, self._busy, self._all, self.own_s = stat, dict.fromkeys(range(4), 0), 0, 0.0
        self.thread: Collection[int] = EVERYWHERE
        monkeypatch.setattr(busy, "STAT", stat)
        monkeypatch.setattr(home_core, "_thread", threading.local())
        monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: setattr(self, "thread", cores))
        self.passes({})
        self.home = HomeCore(range(4), core_times(), lambda: self.own_s)

    def passes(self, busy: Mapping[int, int], ticks: int = 100) -> None:
        self._all += ticks
        for core, spent in busy.items():
            self._busy[core] += spent
        lines = (f"cpu{core} {spent} 0 0 {self._all - spent} 0 0 0 0 0 0\n" for core, spent in self._busy.items())
        self._stat.write_text("".join(lines), encoding="ascii")

    def looks(self, busy: Mapping[int, int], own_s: float = 0.0, ticks: int = 100) -> Collection[int]:
        """Let a second pass, have the worker look, and return where a thread runs that carries out an action."""
        self.passes(busy, ticks)
        self.own_s += own_s
        self.home.look(core_times())
        self.home.settle(own=True)
        return self.thread


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path / "stat", monkeypatch)


def test_threads_go_where_it_is_idle_most_and_stay_while_no_core_is_much_better(machine: Machine) -> None:
    machine.home.settle(own=True)
    assert machine.thread == EVERYWHERE
    assert machine.looks({0: 90, 1: 50, 2: 20, 3: 90}) == {2}
    # What the worker itself takes does not drive it away, nor what is little, nor does it look more often than the kernel counts
    assert machine.looks({0: 90, 1: 10, 2: 90, 3: 90}, own_s=0.8) == {2}
    assert machine.looks({0: 90, 1: 10, 2: 30, 3: 90}) == {2}
    assert machine.looks({2: 10}, ticks=10) == {2}
    # Another command does
    assert machine.looks({0: 90, 1: 10, 2: 90, 3: 90}) == {1}
    # And where all cores are busy, the kernel is to find a moment on one
    assert machine.looks({0: 100, 1: 90, 2: 100, 3: 100}) == EVERYWHERE
    assert machine.looks({0: 60, 1: 90, 2: 100, 3: 100}) == {0}


def test_what_users_have_declared_and_what_the_worker_starts_runs_anywhere(machine: Machine) -> None:
    assert machine.looks({0: 90, 1: 90, 2: 90}) == {3}
    machine.home.settle(own=False)
    assert machine.thread == EVERYWHERE
    machine.home.settle(own=True)
    assert machine.thread == {3}
    go_anywhere()
    assert machine.thread == EVERYWHERE
    machine.home.settle(own=True)
    assert machine.thread == {3}
    # Also in a thread that one of the worker's has made, whose cores it has
    with ThreadPoolExecutor(1) as made:
        made.submit(machine.home.settle, own=False).result(60)
    assert machine.thread == EVERYWHERE


def test_a_kernel_that_tells_of_other_cores_and_a_single_core_leave_threads_anywhere(machine: Machine, tmp_path: Path) -> None:
    assert machine.looks({0: 90, 1: 90, 2: 90}) == {3}
    (tmp_path / "stat").write_text("cpu0 0 0 0 0 0 0 0 0 0 0\n", encoding="ascii")
    machine.home.look(core_times())
    machine.home.settle(own=True)
    assert machine.thread == EVERYWHERE
    machine.home = HomeCore([0], core_times())
    assert machine.looks({}) == EVERYWHERE
