"""Work split over processes.

Processes and pipes only: the pools of the standard library need shared semaphores, which small sandboxes lack.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_CAN_FORK = "fork" in multiprocessing.get_all_start_methods()


def default_jobs() -> int:
    """Give the number of processes that the surroundings ask for with `TANGRAM_DOP`, else 1."""
    return max(int(os.environ.get("TANGRAM_DOP", "1")), 1)


def map_parts(function: Callable[[Sequence[Item]], Result], items: Sequence[Item], jobs: int) -> list[Result]:
    """Deal `items` out to `jobs` processes, call `function` once in each, and give the results in order.

    Raises `RuntimeError` with the traceback of a part that failed.
    """
    parts = [items[offset::jobs] for offset in range(min(jobs, len(items)))]
    if len(parts) <= 1:
        return [function(part) for part in parts]
    context = multiprocessing.get_context("fork") if _CAN_FORK else multiprocessing.get_context("spawn")
    running = []
    for part in parts:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(function, part, sender))
        process.start()
        sender.close()
        running.append((process, receiver))
    results = []
    for process, receiver in running:
        try:
            error, result = receiver.recv()
        except EOFError:
            error, result = "the process ended without a result", None
        process.join()
        if error:
            raise RuntimeError(error)
        results.append(result)
    return results


def _run(function: Callable[[Sequence[Item]], Result], part: Sequence[Item], sender: Connection) -> None:
    try:
        sender.send((None, function(part)))
    except Exception:
        sender.send((traceback.format_exc(), None))
