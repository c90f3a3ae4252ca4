"""The thread that looks at the memory of environments looks earlier at one where that is asked for."""

from __future__ import annotations

import queue
from contextlib import closing
from typing import cast

from workers.cpu.memory.allowance import Allowance
from workers.cpu.memory.watcher import Watcher


class Idle:
    """Says at each look that the next one has time."""

    environment = "e"

    def __init__(self) -> None:
        self.looks: queue.Queue[None] = queue.Queue()

    def look(self) -> float:
        self.looks.put(None)
        return 3600.0


def test_one_that_need_not_be_looked_at_for_long_is_looked_at_once_an_action_begins() -> None:
    with closing(Watcher()) as watcher:
        idle = Idle()
        allowance = cast(Allowance, idle)
        watcher.watch(allowance)
        for patience_s in (0.02, 0.04, 0.0):
            idle.looks.get(timeout=60)
            watcher.look_within(allowance, patience_s)
        idle.looks.get(timeout=60)
