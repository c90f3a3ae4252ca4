"""The time, and all that waits for it: threads, queues, events, locks.

A client's session, the scheduler, the broker and a node take the time from here. So all of them can run in one thread on a virtual clock
(`tests/virtual`). In production each function is the standard library's. Call them as `clock.time()`: a name that was imported by itself
stays with the clock that was in force. Code that the simulation does not run uses `time` and
`threading` directly: streams of output, Redis' intake, retention, metrics.
"""

from __future__ import annotations

import queue
import threading
import time as system
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol


class Task(Protocol):
    """A thread, as its starter sees it."""

    def start(self) -> None:
        """Begin to run."""

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end, at most `timeout` seconds."""

    def is_alive(self) -> bool:
        """Whether it runs."""


class Clock:
    """The system's clock and its threads."""

    def time(self) -> float:
        """Return the seconds since the epoch."""
        return system.time()

    def monotonic(self) -> float:
        """Return seconds that no operator sets back."""
        return system.monotonic()

    def sleep(self, seconds: float) -> None:
        """Do nothing for some seconds."""
        system.sleep(seconds)

    def event(self) -> threading.Event:
        """Return an event that is not set."""
        return threading.Event()

    def lock(self) -> AbstractContextManager[Any]:
        """Return a lock that nobody holds. Its holder may take it again."""
        return threading.RLock()

    def fifo(self) -> queue.SimpleQueue[Any]:
        """Return an empty queue."""
        return queue.SimpleQueue()

    def thread(self, run: Callable[[], object], name: str) -> Task:
        """Return a daemon thread that has not begun."""
        return threading.Thread(target=run, name=name, daemon=True)

    def runs_in(self, task: Task) -> bool:
        """Whether the caller runs in this thread."""
        return task is threading.current_thread()

    def wait(self, futures: Sequence[Future[Any]], timeout_s: float | None = None) -> bool:
        """Wait until one of some futures is done, at most `timeout_s` seconds; return whether one is."""
        return bool(wait_for_futures(futures, timeout_s, FIRST_COMPLETED).done)

    def pool(self, most: int, name: str) -> Executor:
        """Return a pool of at most `most` threads, none of them started."""
        return ThreadPoolExecutor(most, thread_name_prefix=name)


_system = Clock()
time, monotonic, sleep = _system.time, _system.monotonic, _system.sleep
event, lock, fifo, thread = _system.event, _system.lock, _system.fifo, _system.thread
runs_in, wait, pool = _system.runs_in, _system.wait, _system.pool

_FUNCTIONS = ("time", "monotonic", "sleep", "event", "lock", "fifo", "thread", "runs_in", "wait", "pool")


@contextmanager
def installed(clock: Clock) -> Iterator[None]:
    """Let everything in this process go by `clock`. Only for tests: what waits already goes by the clock before."""
    before = {name: globals()[name] for name in _FUNCTIONS}
    globals().update({name: getattr(clock, name) for name in _FUNCTIONS})
    try:
        yield
    finally:
        globals().update(before)
