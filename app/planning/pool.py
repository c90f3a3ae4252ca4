"""Simulations in processes: each case is simulated once, however often it is asked for.

The processes are forks, which share the trace with this one. So a pool is opened before anything starts a thread.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType
from typing import Self

from app.planning.cases import Case, Outcome, run_case
from scheduler.sim.trace import Trace
from tangram.errors import TangramError

_PR_SET_PDEATHSIG = 1

_trace: Trace | None = None


def _begin(trace: Trace) -> None:
    """Prepare a process of the pool: it holds the trace, and does not outlive who asked."""
    global _trace
    _trace = trace
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _run(case: Case) -> Outcome:
    assert _trace is not None
    return run_case(_trace, case)


class Simulations:
    """Outcomes of cases of one trace, `processes` at a time; `done` has those that were asked for, in that order."""

    def __init__(self, trace: Trace, processes: int, progress: Callable[[Case, int], None] = lambda case, count: None) -> None:
        """Start the processes; `progress(case, count)` is called after each simulation with the number of those that were done."""
        self.trace = trace
        self.at_once = processes
        self.progress = progress
        self.done: dict[Case, Outcome] = {}
        context = multiprocessing.get_context("fork")
        self._pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_begin, initargs=(trace,))
        self._pool.submit(int).result()  # with forks, the first task starts all processes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the processes, in the middle of a simulation where something has gone wrong."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            if error is not None:
                process.kill()
            process.join()

    def outcomes(self, cases: Sequence[Case]) -> list[Outcome]:
        """Return the outcome of each case, as far as possible at the same time."""
        wanted = [case for case in dict.fromkeys(cases) if case not in self.done]
        futures = [(case, self._pool.submit(_run, case)) for case in wanted]
        try:
            for case, future in futures:
                self.done[case] = future.result()
                self.progress(case, len(self.done))
        except BrokenProcessPool:
            raise TangramError("a process of the simulation ended by itself: there may be too little memory for so many at once") from None
        return [self.done[case] for case in cases]
