"""Who holds a core of its own and may lose it: the preemptible actions of one group, the worst to keep first.

The worst is the one of lowest priority, then the one with most expected work left. That expectation changes when an action or
its trajectory comes into another bin of its life table, so each holder says when it is to be read again. A holder that has its
*turn* is not on offer until the turn ends.

Nothing is worked out for holders that nobody contends with: they are `fresh` until somebody does.

Entries of the heaps are not removed when a holder changes; each bears the number of the change that it was made by.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from scheduler.model import Running


@dataclass(slots=True, eq=False)
class Holder:
    """A running action on cores of its own; `left_s` is the work expected of it and its trajectory, in seconds."""

    running: Running
    left_s: float
    change: int = 0

    @property
    def job(self) -> str:
        """Its job."""
        return self.running.waiting.action.job

    @property
    def priority(self) -> int:
        """Its priority."""
        return self.running.waiting.action.priority


class Foreground:
    """The holders of one group, by job."""

    def __init__(self) -> None:
        self._fresh: dict[str, Running] = {}
        """Holders that have not been offered yet."""
        self._holders: dict[str, Holder] = {}
        self._worst: dict[str, list[tuple[int, float, int, int, Holder]]] = {}
        self._due: list[tuple[float, int, int, Holder]] = []
        self._turns: dict[str, None] = {}
        self._changes = 0

    @property
    def turns(self) -> int:
        """How many holders have their turn."""
        return len(self._turns)

    def enter(self, running: Running) -> None:
        """Note an action that has got cores that it may lose."""
        self._fresh[running.waiting.id] = running

    def offer(self, running: Running, left_s: float, again_at: float) -> None:
        """Note that a holder may lose its cores, what is expected of it, and when that is to be read again."""
        holder = self._change(running)
        holder.left_s = left_s
        entry = (holder.priority, -left_s, -running.waiting.seq, holder.change, holder)
        heapq.heappush(self._worst.setdefault(holder.job, []), entry)
        heapq.heappush(self._due, (again_at, running.waiting.seq, holder.change, holder))

    def protect(self, running: Running, until: float) -> None:
        """Give a holder its turn; that of an action that cannot lose its cores ends with it."""
        self._fresh.pop(running.waiting.id, None)
        holder = self._change(running)
        self._turns[running.waiting.id] = None
        heapq.heappush(self._due, (until, running.waiting.seq, holder.change, holder))

    def unsettled(self, now: float, turn_s: float) -> list[Running]:
        """Return the holders without a turn that have had their cores for less than a turn by now."""
        running = (holder.running for holder in self._holders.values() if holder.running.waiting.id not in self._turns)
        return [one for one in running if one.on_cores_since + turn_s > now and not one.stopping]

    def leave(self, action_id: str) -> None:
        """Forget a holder, if it is one."""
        self._fresh.pop(action_id, None)
        self._turns.pop(action_id, None)
        holder = self._holders.pop(action_id, None)
        if holder is not None:
            holder.change = -1

    def take_due(self, now: float) -> list[Running]:
        """Return the holders that are to be read by now, each once; `offer` them."""
        due = [*self._fresh.values()]
        self._fresh.clear()
        while (at := self.next_due()) is not None and at <= now:
            holder = heapq.heappop(self._due)[3]
            self._turns.pop(holder.running.waiting.id, None)
            self._change(holder.running)
            due.append(holder.running)
        return due

    def next_due(self) -> float | None:
        """Return when a holder is to be read again."""
        while self._due and self._due[0][2] != self._due[0][3].change:
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else None

    def worst(self, last: Callable[[str], bool], may: Callable[[Holder], bool]) -> Holder | None:
        """Return the holder that is to lose its cores first, of those that `may`; those of jobs that come `last` go before all others."""
        found: tuple[tuple[bool, int, float, int], Holder] | None = None
        for job in tuple(self._worst):
            heap = self._worst[job]
            while heap and (heap[0][3] != heap[0][4].change or heap[0][4].running.stopping):
                heapq.heappop(heap)
            if not heap:
                del self._worst[job]
                continue
            priority, left_s, seq, _, holder = heap[0]
            if not may(holder):
                continue
            order = (not last(job), priority, left_s, seq)
            if found is None or order < found[0]:
                found = (order, holder)
        return None if found is None else found[1]

    def _change(self, running: Running) -> Holder:
        holder = self._holders.get(running.waiting.id)
        if holder is None:
            holder = self._holders[running.waiting.id] = Holder(running, 0.0)
        self._changes += 1
        holder.change = self._changes
        return holder
