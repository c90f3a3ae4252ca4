"""Holds threads back at random while a test runs, to find tests that go by luck: `pytest -p tests.jitter --jitter SEED`.

A loaded machine stops a thread between two statements, seldom and never where one looks. Here a thread stops as it enters or leaves a
function of the product or of a test, or calls one of C: a few times in a test, each time for longer than most of what a test waits for
takes. The places are drawn from the seed, the test's name and the number of the thread in it. A test that fails shows where its threads
have stopped. Other processes, such as shells and servers, are not held back.
"""

from __future__ import annotations

import itertools
import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import pytest

STOPS = ((5, 0.05, 0.4), (1, 1.0, 3.0))
"""How often a thread is stopped at most, and for how many seconds, from and to; one of these is drawn for each thread."""

ONE_IN = (20, 60, 200, 600)
"""How many events of a thread there are for each stop in the mean; one of these is drawn for each thread."""

_ROOT = Path(__file__).resolve().parent.parent
_PLACES = tuple(f"{_ROOT / folder}/" for folder in ("app", "scheduler", "tangram", "workers", "tests"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--jitter", metavar="SEED", help="hold threads back at random; the seed decides where")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Hold back every thread of a test from here on, also those of its fixtures."""
    seed = item.config.getoption("jitter")
    if seed is not None:
        RunningTest.now = RunningTest(f"{seed} {item.nodeid}")
        threading.setprofile(begin)
        sys.setprofile(begin)
    yield from _told(item, "setup")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Tell where threads have stopped by the end of the call."""
    yield from _told(item, "call")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Hold nothing back once a test is over."""
    yield from _told(item, "teardown")
    sys.setprofile(None)
    threading.setprofile(None)
    RunningTest.now = None


def _told(item: pytest.Item, when: str) -> Iterator[None]:
    yield
    if RunningTest.now is not None:
        item.add_report_section(when, "jitter", "\n".join(RunningTest.now.stopped))
        RunningTest.now.stopped.clear()


class RunningTest:
    """A test that runs, and where its threads have stopped."""

    now: ClassVar[RunningTest | None] = None

    def __init__(self, name: str) -> None:
        self.name, self.stopped = name, list[str]()
        self.threads = itertools.count()


def begin(*event: Any) -> None:
    """Hold back the thread that calls this, from its first event on."""
    stops = Stops()
    sys.setprofile(stops)
    stops(*event)


class Stops:
    """The stops of one thread. They are drawn anew for each test in which the thread lives."""

    def __init__(self) -> None:
        self._test: RunningTest | None = None

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """Count one event of Python's, and stop where it is the one."""
        test = RunningTest.now
        if test is None or not frame.f_code.co_filename.startswith(_PLACES):
            return
        if test is not self._test:
            self._test, self._random = test, random.Random(f"{test.name} {next(test.threads)}")
            self._left, *self._from_to_s = self._random.choice(STOPS)
            self._one_in = self._random.choice(ONE_IN)
            self._next = self._draw()
        self._next -= 1
        if self._next <= 0 and self._left:
            self._next = self._draw()
            self._left -= 1
            seconds = self._random.uniform(*self._from_to_s)
            thread, place = threading.current_thread().name, frame.f_code.co_filename.removeprefix(f"{_ROOT}/")
            called = f" {getattr(argument, '__qualname__', '')}" if event.startswith("c_") else f" {frame.f_code.co_qualname}"
            test.stopped.append(f"{thread}: {seconds:.2f} s at {event}{called}, {place}:{frame.f_lineno}")
            time.sleep(seconds)

    def _draw(self) -> int:
        return 1 + int(self._random.expovariate(1 / self._one_in))
