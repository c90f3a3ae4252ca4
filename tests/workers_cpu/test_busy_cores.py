"""How many cores are busy, as the kernel counts it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from workers.cpu import busy
from workers.cpu.busy import BusyCores, core_times


def test_a_core_that_computes_is_busy() -> None:
    cores = sorted(os.sched_getaffinity(0))
    found = BusyCores(cores, core_times())
    until = time.process_time() + 0.1
    while time.process_time() < until:
        pass
    assert 0 < found.since_last(core_times())["busy_cores"] <= len(cores)


@pytest.mark.parametrize(
    ("cores", "numbers"),
    [((), (0, 1)), ((1, 3), (0, 1)), ((1, 3), (0, 2)), ((1, 3), ())],
    ids=["made up", "numbered anew", "one is offline", "no such file"],
)
def test_cores_that_the_kernel_does_not_tell_of_are_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: tuple[int, ...], numbers: tuple[int, ...]
) -> None:
    # Given a kernel that tells of other cores than the worker may use, as in some containers
    stat = tmp_path / "stat"
    if numbers:
        stat.write_text("".join(f"cpu{number} 1 2 3 4 5 6 7 8 9 10\n" for number in numbers) + "intr 5\n", encoding="ascii")
    monkeypatch.setattr(busy, "STAT", stat)
    assert BusyCores(cores, core_times()).since_last(core_times()) == {}


def test_each_core_is_found_by_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = tmp_path / "stat"
    monkeypatch.setattr(busy, "STAT", stat)
    stat.write_text(
        "cpu 0 0 0 0 0 0 0 0 0 0\ncpu0 0 0 0 0 0 0 0 0 0 0\ncpu2 0 0 0 0 0 0 0 0 0 0\ncpu3 0 0 0 0 0 0 0 0 0 0\n", encoding="ascii"
    )
    found = BusyCores((2, 3), core_times())
    stat.write_text("cpu0 100 0 0 0 0 0 0 0 0 0\ncpu2 50 0 0 50 0 0 0 0 50 0\ncpu3 0 0 0 0 100 0 0 0 0 0\n", encoding="ascii")
    assert found.since_last(core_times()) == {"busy_cores": 0.5}
