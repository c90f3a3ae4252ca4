"""Holds threads back at random while a test runs, to find tests that go by luck: `pytest -p tests.jitter --jitter SEED`.

A loaded machine stops a thread between two statements, seldom and never where one looks. Here a thread stops as it enters or leaves a
function of the product or of a test, or calls one of C: a few times in its life, each time for longer than most of what a test waits for
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
from typing import Any

import pytest

STOPS, STOP_S = 5, (0.05, 0.4)
"""How often a thread is stopped at most, and for how many seconds, from and to."""

ONE_IN = (20, 60, 200, 600)
"""How many events of a thread there are for each stop in the mean; one of these is drawn for each thread."""

_ROOT = Path(__file__).resolve().parent.parent
_PLACES = tuple(f"{_ROOT / folder}/" for folder in ("app", "scheduler", "tangram", "workers", "tests"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take the seed."""
    parser.addoption("--jitter", metavar="SEED", help="hold threads back at random; the seed decides where")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Hold back every thread that begins during the call of a test, and the test's own."""
    seed = item.config.getoption("jitter")
    if seed is None:
        yield
        return
    numbers, stopped = itertools.count(), list[str]()

    def begin(*event: Any) -> None:
        stops = Stops(random.Random(f"{seed} {item.nodeid} {next(numbers)}"), stopped)
        sys.setprofile(stops)
        stops(*event)

    threading.setprofile(begin)
    sys.setprofile(begin)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        item.add_report_section("call", f"jitter {seed}", "\n".join(stopped))


class Stops:
    """The stops of one thread."""

    def __init__(self, drawn: random.Random, stopped: list[str]) -> None:
        self._random, self._stopped = drawn, stopped
        self._one_in = drawn.choice(ONE_IN)
        self._left = STOPS
        self._next = self._draw()

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """Count one event of Python's, and stop where it is the one."""
        if not frame.f_code.co_filename.startswith(_PLACES):
            return
        self._next -= 1
        if self._next <= 0 and self._left:
            self._next = self._draw()
            self._left -= 1
            seconds = self._random.uniform(*STOP_S)
            thread, place = threading.current_thread().name, frame.f_code.co_filename.removeprefix(f"{_ROOT}/")
            called = f" {getattr(argument, '__qualname__', '')}" if event.startswith("c_") else f" {frame.f_code.co_qualname}"
            self._stopped.append(f"{thread}: {seconds:.2f} s at {event}{called}, {place}:{frame.f_lineno}")
            time.sleep(seconds)

    def _draw(self) -> int:
        return 1 + int(self._random.expovariate(1 / self._one_in))
