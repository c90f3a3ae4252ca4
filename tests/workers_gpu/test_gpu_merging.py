"""Merging calls that wait, without a model: the work is a function that waits at a gate and writes down its rounds."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engines.waiting import until
from workers.gpu.call_control import CallControl
from workers.gpu.engines.merging import Merger
from workers.gpu.errors import CallCancelled


class Bench:
    """A merger whose inputs are numbers of that size, answered by ten times themselves; 13 breaks a round."""

    def __init__(self, bound: int = 100) -> None:
        self.rounds: list[list[int]] = []
        self.gate = threading.Semaphore(0)
        self.pool = ThreadPoolExecutor(32)
        self.merger: Merger[int, int] = Merger(self.work, lambda number: number, lambda: bound)

    def work(self, numbers: list[int]) -> list[int]:
        self.rounds.append(numbers)
        assert self.gate.acquire(timeout=60)
        if 13 in numbers:
            raise ArithmeticError("13")
        return [10 * number for number in numbers]

    def open(self, rounds: int = 1000) -> None:
        """Let so many rounds through."""
        self.gate.release(rounds)

    def call(self, *numbers: int, control: CallControl | None = None) -> Future[list[int]]:
        """Make a call and return once it is in line."""
        before = len(self.merger._calls)
        asked = self.pool.submit(self.merger.ask, numbers, control or CallControl())
        while len(self.merger._calls) == before and not asked.done():
            pass
        return asked


@pytest.fixture
def bench() -> Any:
    made = Bench()
    yield made
    made.open()
    made.pool.shutdown()


def test_a_round_is_bounded_and_nobody_overtakes(bench: Bench) -> None:
    first = bench.call(1)
    until(lambda: bool(bench.rounds))
    # Given a call that needs two rounds, one that would fit beside its first, and an input larger than any round
    calls = [bench.call(60, 60), bench.call(10), bench.call(500), bench.call(7)]
    bench.open()
    assert [call.result(60) for call in calls] == [[600, 600], [100], [5000], [70]]
    assert first.result(60) == [10]
    assert bench.rounds == [[1], [60], [60, 10], [500], [7]]


def test_a_call_that_breaks_a_round_fails_alone(bench: Bench) -> None:
    first = bench.call(1)
    until(lambda: bool(bench.rounds))
    good, bad, after = bench.call(3), bench.call(2, 13), bench.call(4)
    bench.open()
    assert (first.result(60), good.result(60), after.result(60)) == ([10], [30], [40])
    with pytest.raises(ArithmeticError, match="13"):
        bad.result(60)
    assert bench.rounds == [[1], [3, 13, 2, 4], [3], [13, 2], [4]]
    assert bench.call(5).result(60) == [50]


def test_a_call_cancelled_in_a_round_of_others_ends_at_once(bench: Bench) -> None:
    first = bench.call(1)
    until(lambda: bool(bench.rounds))
    control = CallControl()
    leads, rides = bench.call(2), bench.call(3, control=control)
    bench.open(1)
    until(lambda: bench.rounds == [[1], [2, 3]])
    control.cancelled.set()
    with pytest.raises(CallCancelled):
        rides.result(60)
    assert not leads.done()
    bench.open()
    assert (first.result(60), leads.result(60)) == ([10], [20])


def test_a_leader_that_is_interrupted_takes_nobody_else_along() -> None:
    class Interrupted(BaseException):
        pass

    gate, first = threading.Event(), [True]

    def work(numbers: list[int]) -> list[int]:
        assert gate.wait(60)
        if first.pop() if first else False:
            raise Interrupted
        return numbers

    merger: Merger[int, int] = Merger(work, lambda number: 1, lambda: 10)
    with ThreadPoolExecutor(2) as pool:
        leader = pool.submit(merger.ask, [1], CallControl())
        until(lambda: merger._busy)
        other = pool.submit(merger.ask, [2], CallControl())
        gate.set()
        with pytest.raises(Interrupted):
            leader.result(60)
        assert other.result(60) == [2]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.lists(st.integers(1, 12), max_size=6), min_size=1, max_size=12), st.integers(1, 30))
def test_every_call_gets_its_own_answers_in_rounds_within_the_bound(calls: list[list[int]], bound: int) -> None:
    bench = Bench(bound)
    bench.open()
    with bench.pool:
        asked = [bench.pool.submit(bench.merger.ask, numbers, CallControl()) for numbers in calls]
        assert [call.result(60) for call in asked] == [[10 * number for number in numbers] for numbers in calls]
    assert sorted(chain.from_iterable(bench.rounds)) == sorted(chain.from_iterable(calls))
    assert all(sum(numbers) <= bound or len(numbers) == 1 for numbers in bench.rounds)
