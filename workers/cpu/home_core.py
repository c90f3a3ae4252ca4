"""The one core on which the threads of a worker run that carry out this system's actions.

Python runs one thread at a time. A command makes some hundred system calls, and during each of them another thread may go on. Where a
second core is idle, that thread goes on there at once, and the first one has to wait for the interpreter after its call. So each system
call costs two changes of thread. On one core the first thread is back before another one begins.
With each beat, the worker looks for the core that is idle most. Its threads go there, each before its next action.

| the cores of the worker        | its threads run                                                                |
|--------------------------------|--------------------------------------------------------------------------------|
| one, or the kernel tells none  | anywhere                                                                       |
| all are busy                   | anywhere: the kernel knows better which one is free for a moment               |
| another is idler by `GAIN`     | there, from their next action on                                               |
| otherwise                      | where they are                                                                 |

The time that the worker itself takes counts as idle. Tasks that users have declared run anywhere, as they may compute. A child begins on
the cores of the thread that starts it, so that thread goes anywhere first.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Final

from workers.cpu.busy import Times, of_cores

LEAST_IDLE: Final = 0.2
"""The least part of the time that the core of the threads must be idle."""
GAIN: Final = 0.25
"""The least part of the time that another core must be idle beyond theirs, for the threads to go there."""
LEAST_S: Final = 0.2
"""Seconds between two looks at least: the kernel counts in hundredths of a second."""

_EVERYWHERE: Final = frozenset(os.sched_getaffinity(0))
_thread = threading.local()


def go_to(cores: Collection[int]) -> None:
    """Have the calling thread run on these cores from now on. Where none of them is there any more, it stays where it is."""
    if getattr(_thread, "cores", None) is not cores:  # a thread begins on the cores of the one that has made it
        _thread.cores = cores
        with suppress(OSError):
            os.sched_setaffinity(0, cores)


def go_anywhere() -> None:
    """Have the calling thread, and what it starts from now on, run on all cores of the worker."""
    go_to(_EVERYWHERE)


class HomeCore:
    """Chooses the core. `look` is for the thread that makes the beats, `settle` for any."""

    def __init__(self, cores: Collection[int], times: Times, spent_s: Callable[[], float] = time.process_time) -> None:
        """Choose among these cores of the machine, by their `times` from these on; `spent_s` tells the CPU seconds of the worker so far."""
        self._candidates = tuple(cores) if len(cores) > 1 else ()
        self._home: Collection[int] = _EVERYWHERE
        self._spent_s = spent_s
        self._own_s, self._last = spent_s(), of_cores(times, self._candidates)

    def settle(self, own: bool) -> None:
        """Have the calling thread run on the chosen core, or anywhere unless it does `own` work of this system."""
        go_to(self._home if own else _EVERYWHERE)

    def look(self, times: Times) -> None:
        """Choose the core anew, by how idle each has been since the last look."""
        before, now, own_before_s, own_s = self._last, of_cores(times, self._candidates), self._own_s, self._spent_s()
        if not before or before.keys() != now.keys():
            self._last, self._own_s, self._home = now, own_s, _EVERYWHERE
            return
        passed_s = {core: all_s - before[core][1] for core, (_, all_s) in now.items()}
        if min(passed_s.values()) < LEAST_S:
            return
        self._last, self._own_s = now, own_s
        idle = {core: 1 - (busy_s - before[core][0]) / passed_s[core] for core, (busy_s, _) in now.items()}
        here = [core for core in idle if core in self._home]
        for core in here:
            idle[core] += (own_s - own_before_s) / passed_s[core] / len(here)
        best = max(idle, key=idle.__getitem__)
        if idle[best] < LEAST_IDLE:
            self._home = _EVERYWHERE
        elif len(here) > 1 or idle[here[0]] < max(LEAST_IDLE, idle[best] - GAIN):
            self._home = frozenset((best,))
        self.settle(own=True)
