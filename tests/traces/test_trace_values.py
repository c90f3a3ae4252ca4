"""Tiling a trace, and the class of a command."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.sim.trace import Step, Trace, TraceAction, Trajectory, tile
from tangram.action import command_class
from tangram.errors import InvalidAction

STEPS = (Step(actions=(TraceAction(kind="cpu.exec", work_s=1.0),)),)


def trace_of(*names: str) -> Trace:
    return Trace(trajectories=tuple(Trajectory(trajectory=name, steps=STEPS, arrival_s=7.0) for name in names))


@pytest.mark.parametrize(
    ("names", "count", "tiled"),
    [
        (["a", "b"], 5, ["a", "b", "a#2", "b#2", "a#3"]),
        (["a", "b", "c"], 2, ["a", "b"]),
        (["a", "a#2"], 4, ["a", "a#2", "a#2#2", "a#2#2#2"]),
    ],
)
def test_copies_come_in_order_each_with_a_number_that_is_not_taken(names: list[str], count: int, tiled: list[str]) -> None:
    assert [each.trajectory for each in tile(trace_of(*names), count, 60.0, 1).trajectories] == tiled


@given(st.integers(1, 50), st.floats(0, 1e6), st.integers())
def test_arrivals_lie_within_the_spread_and_follow_from_the_seed(count: int, spread_s: float, seed: int) -> None:
    tiled = tile(trace_of("a", "b", "c"), count, spread_s, seed)
    assert len(tiled.trajectories) == count
    assert all(0.0 <= each.arrival_s <= spread_s for each in tiled.trajectories)
    assert tiled == tile(trace_of("a", "b", "c"), count, spread_s, seed)


def test_arrivals_are_spread_over_the_whole_time() -> None:
    arrivals = sorted(each.arrival_s for each in tile(trace_of("a"), 1000, 60.0, 1).trajectories)
    assert arrivals[500] == pytest.approx(30.0, abs=4.0)
    assert arrivals[-1] > 58.0


@pytest.mark.parametrize(("count", "spread_s"), [(0, 1.0), (-1, 1.0), (1, -1.0), (1, float("nan")), (1, float("inf"))])
def test_impossible_counts_and_spreads_are_refused(count: int, spread_s: float) -> None:
    with pytest.raises(InvalidAction):
        tile(trace_of("a"), count, spread_s, 1)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("pytest -q", "pytest"),
        ("/usr/bin/python3 -m x", "python3"),
        ("CI=1 PATH=/bin:/x make test", "make"),
        ("(cd /x && ls)", "cd"),
        ("edit 1:1\nfoo\nend_of_edit", "edit"),
        ("", "shell"),
        ("A=1", "shell"),
        ("{ ls; }", "shell"),
        ("x" * 1000, "x" * 64),
    ],
)
def test_the_class_of_a_command_is_its_first_word(command: str, expected: str) -> None:
    assert command_class(command) == expected
