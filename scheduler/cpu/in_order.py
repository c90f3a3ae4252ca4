"""Cores given out in the order of the queue, for `paper`, `fcfs`, `fixed:N` and `static:N`. Running actions keep their cores."""

from __future__ import annotations

from itertools import islice

from scheduler.choosing.abstract import Chooser
from scheduler.cpu.cores import CoreGroup
from scheduler.cpu.pool import CpuPool, could_run
from scheduler.model import Grant, Waiting
from scheduler.model.queue import merged
from scheduler.model.state import own_memory


class InOrderCores:
    """Shows a chooser the actions of the queue that fit, and starts the chosen ones."""

    def __init__(self, pool: CpuPool, chooser: Chooser) -> None:
        self._pool = pool
        self._chooser = chooser

    def run(self, group: CoreGroup, now: float) -> None:
        """Start actions on the free cores of a group."""
        pool, chooser, node = self._pool, self._chooser, group.node
        room, memory = group.free, node.memory_free
        if not room:
            return
        able = (one for one in merged(pool.queues_of(group)) if one.action.environment is not None or could_run(one, node, group.capacity))
        candidates: list[Waiting] = []
        behind: list[Waiting] = []
        for waiting in able:
            wanted = chooser.wanted(waiting, group.capacity)
            if wanted > room:
                behind = [waiting, *islice(able, max(0, chooser.lookahead - 1))] if chooser.lookahead else []
                break
            own = own_memory(waiting.action)
            if own > memory:
                memory = 0  # actions that need no memory go on; only closing environments may ever free any
                continue
            if waiting.action.cost.quotas and pool.quotas.keeps_back(waiting, group, now):
                continue
            candidates.append(waiting)
            room -= wanted
            memory -= own
        if not candidates:
            return
        for choice in chooser.choose(candidates, behind, group.free, group, now):
            if pool.quotas.keeps_back(choice.waiting, group, now):
                group.touch()  # an earlier action used up the quota: later actions may have the cores
            else:
                self._start(choice.waiting, choice.units, group, now)

    def _start(self, waiting: Waiting, units: int, group: CoreGroup, now: float) -> None:
        pool = self._pool
        pool.quotas.take(waiting, now)
        pool.unqueue(waiting, group)
        grant = Grant(node=group.node.spec.name, attempt=waiting.attempt + 1, units=units, core_ids=group.take(units))
        group.enter(pool.start(waiting, grant, now, waiting.duration_s(units)))
