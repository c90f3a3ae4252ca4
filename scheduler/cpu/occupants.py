"""Who has cores of its own and may lose them: the preemptible actions of one group.

The first to lose its cores is the one of lowest priority, of these the one with most expected work left. That expectation changes
when an action or its trajectory reaches another bin of its life table, so each occupant says when it is to be *refreshed*. An
occupant that has its *turn* loses nothing until the turn ends.

Nothing is worked out for occupants while nobody else wants their cores: they are `fresh` until somebody does.

Entries of the heaps are not removed when an occupant changes: each bears the version that it was made for.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from scheduler.model import Running


@dataclass(slots=True, eq=False)
class Occupant:
    """A running action on cores of its own.

    `left_s` is the work expected of it and its trajectory, in seconds on one core; `refresh_at` is when that changes.
    """

    running: Running
    left_s: float = 0.0
    refresh_at: float = 0.0
    version: int = 0

    @property
    def job(self) -> str:
        """Its job."""
        return self.running.waiting.action.job

    @property
    def priority(self) -> int:
        """Its priority."""
        return self.running.waiting.action.priority


class Occupants:
    """The occupants of one group, by job."""

    def __init__(self) -> None:
        self._fresh: dict[str, Running] = {}
        self._occupants: dict[str, Occupant] = {}
        self._order: dict[str, list[tuple[int, float, int, int, Occupant]]] = {}
        self._due: list[tuple[float, int, int, Occupant]] = []
        self._turns: dict[str, None] = {}
        self._versions = 0

    @property
    def turns(self) -> int:
        """How many occupants have their turn."""
        return len(self._turns)

    def enter(self, running: Running) -> None:
        """Note an action that has got cores that it may lose."""
        self._fresh[running.waiting.id] = running

    def leave(self, action_id: str) -> None:
        """Forget an occupant, if it is one."""
        self._fresh.pop(action_id, None)
        self._turns.pop(action_id, None)
        occupant = self._occupants.pop(action_id, None)
        if occupant is not None:
            occupant.version = -1

    def offer(self, running: Running, left_s: float, refresh_at: float) -> None:
        """Note that an occupant may lose its cores, what is expected of it, and when to refresh that."""
        occupant = self._renew(running)
        occupant.left_s, occupant.refresh_at = left_s, refresh_at
        entry = (occupant.priority, -left_s, -running.waiting.seq, occupant.version, occupant)
        heapq.heappush(self._order.setdefault(occupant.job, []), entry)
        heapq.heappush(self._due, (refresh_at, running.waiting.seq, occupant.version, occupant))

    def protect(self, running: Running, until: float) -> None:
        """Give an occupant its turn. That of an action that cannot lose its cores ends with the action."""
        self._fresh.pop(running.waiting.id, None)
        occupant = self._renew(running)
        self._turns[running.waiting.id] = None
        heapq.heappush(self._due, (until, running.waiting.seq, occupant.version, occupant))

    def recent(self, now: float, turn_s: float) -> list[Running]:
        """Return the occupants without a turn that have had their cores for less than a turn by now."""
        running = (occupant.running for occupant in self._occupants.values() if occupant.running.waiting.id not in self._turns)
        return [one for one in running if one.on_cores_since + turn_s > now and not one.stopping]

    def take_due(self, now: float) -> list[Running]:
        """Return the occupants that are to be refreshed by now, each once; `offer` them."""
        due = [*self._fresh.values()]
        self._fresh.clear()
        while (at := self.next_due()) is not None and at <= now:
            occupant = heapq.heappop(self._due)[3]
            self._turns.pop(occupant.running.waiting.id, None)
            self._renew(occupant.running)
            due.append(occupant.running)
        return due

    def next_due(self) -> float | None:
        """Return when an occupant is to be refreshed."""
        while self._due and self._due[0][2] != self._due[0][3].version:
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else None

    def first(self, deprioritised: Callable[[str], bool], may_lose: Callable[[Occupant], bool]) -> Occupant | None:
        """Return who loses its cores first, of those that `may_lose` them; deprioritised jobs go before all others.

        Only the first of each job is asked: where that one may not lose its cores, none of its job does.
        """
        found: tuple[tuple[bool, int, float, int], Occupant] | None = None
        for job in tuple(self._order):
            heap = self._order[job]
            while heap and (heap[0][3] != heap[0][4].version or heap[0][4].running.stopping):
                heapq.heappop(heap)
            if not heap:
                del self._order[job]
                continue
            priority, left_s, seq, _, occupant = heap[0]
            if may_lose(occupant):
                order = (not deprioritised(job), priority, left_s, seq)
                if found is None or order < found[0]:
                    found = (order, occupant)
        return None if found is None else found[1]

    def _renew(self, running: Running) -> Occupant:
        occupant = self._occupants.get(running.waiting.id)
        if occupant is None:
            occupant = self._occupants[running.waiting.id] = Occupant(running)
        self._versions += 1
        occupant.version = self._versions
        return occupant
