"""Virtual time: processes and their threads as greenlets of one thread, on one heap of events.

| a process is | its threads |
|---|---|
| alive | run, one at a time, and give way where they wait and at each call of broker, store or journal |
| starved | lose their turn now and then, also where they read the clock and before they take a lock, as where cores are short |
| frozen | do not run; what they would have done is done when the process goes on, as after SIGSTOP and SIGCONT |
| dead | never run again, not even their `finally`, as after SIGKILL |

Nothing here reads a clock or a random number that the seed has not given.
"""

from __future__ import annotations

import heapq
import itertools
import random
import sys
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from queue import Empty
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

from tangram.clock import Clock

EPOCH = 1_700_000_000.0
MONOTONIC = 1000.0
"""What the monotonic clock shows at the start."""
"""The time of day at which each world begins."""

STARVED_S = 0.6
"""The longest time for which a thread loses its turn; mostly it is much shorter."""

STARVED_IN = ("workers.", "tangram.", "scheduler.live.", "app.action_task", "app.scheduler_process", "app.broker.transport")
"""The modules of processes whose threads may be starved. The others are what is made up here, or do all in one step that others can see."""


class Process:
    """Some threads that live, stand still and die together; its clock may be wrong by `offset_s`."""

    def __init__(self, world: World, name: str, entered: Callable[[], None] = lambda: None) -> None:
        self.world, self.name, self.entered = world, name, entered
        self.alive, self.frozen = True, False
        self.offset_s = 0.0
        self.ended: Exception | None = None
        self._held: list[Callable[[], None]] = []

    def run(self, work: Callable[[], object], name: str) -> Thread:
        """Start a thread."""
        thread = Thread(self, work, name)
        thread.start()
        return thread

    def kill(self) -> None:
        """Let no thread of it run any more."""
        self.alive = False
        self._held.clear()
        if self.world.process() is self:
            self.world.give_way()

    def freeze(self) -> None:
        """Stop it."""
        self.frozen = True

    def thaw(self) -> None:
        """Let it go on."""
        self.frozen = False
        held, self._held = self._held, []
        for go_on in held:
            self.world.soon(go_on)

    def resume(self, go_on: Callable[[], None]) -> None:
        """Let a thread of it go on, unless the process is dead; later, if it is frozen."""
        if self.frozen and self.alive:
            self._held.append(go_on)
        elif self.alive:
            go_on()


class Thread:
    """A thread of a process: `tangram.clock.Task`."""

    def __init__(self, process: Process, work: Callable[[], object], name: str) -> None:
        self.process, self.name = process, name
        self.over: Event = Event(process.world)
        self._work = work
        self._began = False
        self._turn = 0
        self.greenlet = greenlet(self._run, parent=process.world.hub)
        self.greenlet.thread = self  # type: ignore[attr-defined]

    def start(self) -> None:
        self._began = True
        self.process.world.threads.append(self)
        self.process.world.soon(lambda: self.process.resume(self.greenlet.switch))

    def join(self, timeout: float | None = None) -> None:
        self.over.wait(timeout)

    def is_alive(self) -> bool:
        return self._began and not self.over.is_set()

    def block(self, timeout: float | None = None) -> bool:
        """Wait for `wake`; return whether it came before the time was over."""
        self._turn += 1
        turn = self._turn
        if timeout is not None:
            self.process.world.later(timeout, lambda: self.wake(turn, in_time=False))
        return self.process.world.give_way()

    @property
    def turn(self) -> int:
        """The number of the next `block`."""
        return self._turn + 1

    def wake(self, turn: int, *, in_time: bool = True) -> None:
        """End the `block` of this number; an earlier one has ended already."""

        def go_on() -> None:
            if turn == self._turn:
                self._turn += 1
                self.greenlet.switch(in_time)

        if turn == self._turn:
            self.process.resume(go_on)

    def _run(self) -> None:
        try:
            self.process.entered()
            self._work()
        except Exception as error:
            self.process.ended = self.process.ended or error
            self.process.world.failed(self, error)
        finally:
            if not self.process.world.closed:
                self.over.set()


class World(Clock):
    """All processes, and the clock of `tangram.clock` for them."""

    def __init__(self, seed: int, starved: float = 0.0) -> None:
        """Begin. Where a thread may lose its turn, it does so with the probability `starved`."""
        self.random = random.Random(seed)
        self.starved = starved
        self.now = 0.0
        self.hub = getcurrent()
        self.threads: list[Thread] = []
        self.closed = False
        self.failures: list[tuple[str, Exception]] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    # What happens when

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        """Call something after some seconds."""
        heapq.heappush(self._events, (self.now + max(0.0, seconds), next(self._order), call))

    def soon(self, call: Callable[[], None]) -> None:
        """Call something after all that is to happen now, or a moment later."""
        self.later(self.random.choice((0.0, 0.0, 1e-6, 1e-4)), call)

    def run_until(self, condition: Callable[[], bool], limit_s: float) -> bool:
        """Let time pass until a condition holds; return whether it does before `limit_s` seconds are over."""
        until = self.now + limit_s
        while not condition():
            if not self._events or self._events[0][0] > until:
                self.now = until
                return condition()
            at, _, call = heapq.heappop(self._events)
            self.now = max(self.now, at)
            call()
        return True

    def give_way(self) -> bool:
        """Let others run; return what this thread is woken with."""
        if self.closed:
            raise GreenletExit
        return bool(self.hub.switch())

    def starve(self, module: str) -> None:
        """Let the thread lose its turn for a moment, if it may do so in this module."""
        thread = self.thread_here()
        if not self.starved or thread is None or self.closed or not module.startswith(STARVED_IN):
            return
        if self.random.random() < self.starved:
            thread.block(self.random.random() ** 3 * STARVED_S)

    def close(self) -> None:
        """End everything that still waits."""
        self.closed = True
        for thread in self.threads:
            if not thread.greenlet.dead:
                thread.greenlet.throw(GreenletExit)

    def failed(self, thread: Thread, error: Exception) -> None:
        """Note what a thread ended with."""
        self.failures.append((f"{thread.process.name}: {thread.name}", error))

    def thread_here(self) -> Thread | None:
        """Return the thread that runs; None for the test itself."""
        return getattr(getcurrent(), "thread", None)

    def process(self) -> Process | None:
        """Return the process that runs."""
        thread = self.thread_here()
        return thread.process if thread is not None else None

    # `tangram.clock.Clock`

    def time(self) -> float:
        self.starve(_caller())
        process = self.process()
        return EPOCH + self.now + (process.offset_s if process is not None else 0.0)

    def monotonic(self) -> float:
        self.starve(_caller())
        return MONOTONIC + self.now

    def sleep(self, seconds: float) -> None:
        thread = self.thread_here()
        assert thread is not None, "the test itself does not sleep"
        thread.block(seconds)

    def event(self) -> Any:
        return Event(self)

    def lock(self) -> Any:
        return Lock(self)

    def fifo(self) -> Any:
        return Fifo(self)

    def thread(self, run: Callable[[], object], name: str) -> Any:
        process = self.process()
        assert process is not None, "only processes have threads"
        return Thread(process, run, name)

    def runs_in(self, task: Any) -> bool:
        return task is self.thread_here()

    def wait(self, futures: Sequence[Future[Any]], timeout_s: float | None = None) -> bool:
        if any(future.done() for future in futures):
            return True
        thread = self.thread_here()
        assert thread is not None, "the test itself does not wait"
        turn = thread.turn
        for future in futures:
            future.add_done_callback(lambda _: self.soon(lambda: thread.wake(turn)))
        thread.block(timeout_s)
        return any(future.done() for future in futures)

    def pool(self, most: int, name: str) -> Any:
        return Inline()


def _caller() -> str:
    """Return the module that calls this clock."""
    return str(sys._getframe(2).f_globals["__name__"])


class Lock:
    """`threading.RLock`."""

    def __init__(self, world: World) -> None:
        self._world, self._free = world, Event(world)
        self._owner: Thread | None = None
        self._times = 0

    def __enter__(self) -> None:
        self._world.starve(_caller())
        here = self._world.thread_here()
        while self._times and self._owner is not here and not self._world.closed:
            self._free.clear()
            self._free.wait()
        self._owner = here
        self._times += 1

    def __exit__(self, *_: object) -> None:
        self._times -= 1
        self._free.set()


class Event:
    """`threading.Event`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._is_set = False
        self._waiting: list[tuple[Thread, int]] = []

    def is_set(self) -> bool:
        self._world.starve(_caller())
        return self._is_set

    def set(self) -> None:
        self._world.starve(_caller())
        self._is_set = True
        waiting, self._waiting = self._waiting, []
        for thread, turn in waiting:
            self._world.soon(lambda thread=thread, turn=turn: thread.wake(turn))  # type: ignore[misc]

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        thread = self._world.thread_here()
        if not self._is_set and thread is not None and not self._world.closed:
            self._waiting.append((thread, thread.turn))
            thread.block(timeout)
        return self._is_set


class Fifo:
    """`queue.SimpleQueue`."""

    def __init__(self, world: World) -> None:
        self._world, self._there = world, Event(world)
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        self._world.starve(_caller())
        self._items.append(item)
        self._there.set()

    def get_nowait(self) -> Any:
        if not self._items:
            self._there.clear()
            raise Empty
        return self._items.popleft()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        while not self._items:
            self._there.clear()
            self._there.wait(timeout)
            if timeout is not None:
                break
        return self.get_nowait()

    def empty(self) -> bool:
        return not self._items


class Inline(Executor):
    """A pool whose work is done at once, by whoever hands it over."""

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(call(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future
