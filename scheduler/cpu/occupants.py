"""Occupants: the running actions of one group that other actions may take cores from, and the order in which they lose them.

Occupants of jobs beyond their share lose their cores first, then occupants of lower priority, then the ones with more expected work
left. Their rank says how much that is. It changes when an action or its trajectory reaches another bin of its life table. So each
occupant has a time at which it is *refreshed*. An occupant in its *turn* loses nothing until the turn ends.

Nothing is worked out for occupants while no other action wants their cores. Until then they are `fresh`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from scheduler.cpu.heap import GONE, Heap
from scheduler.model import Running


@dataclass(slots=True, eq=False)
class Occupant:
    """A running action on cores of its own.

    `rank` is the expected work left of the action and its trajectory (`scheduler/cpu/ranking.py`). It changes at `refresh_at`.
    """

    running: Running
    rank: float = 0.0
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
        self._order = defaultdict[str, Heap[Occupant]](Heap)
        self._due = Heap[Occupant]()
        self._turns: dict[str, None] = {}
        self._versions = 0

    @property
    def turns(self) -> int:
        """How many occupants have their turn."""
        return len(self._turns)

    def enter(self, running: Running) -> None:
        """Note an action that has got cores and may lose them."""
        self._fresh[running.waiting.id] = running

    def leave(self, action_id: str) -> None:
        """Forget an action, if it is an occupant."""
        self._fresh.pop(action_id, None)
        self._turns.pop(action_id, None)
        occupant = self._occupants.pop(action_id, None)
        if occupant is not None:
            occupant.version = GONE

    def offer(self, running: Running, rank: float, refresh_at: float) -> None:
        """Note that an occupant may lose its cores, its rank, and when to refresh it."""
        occupant = self._renew(running)
        occupant.rank, occupant.refresh_at = rank, refresh_at
        self._order[occupant.job].push(occupant, occupant.priority, -rank, -running.waiting.seq)
        self._due.push(occupant, refresh_at, running.waiting.seq)

    def protect(self, running: Running, until: float) -> None:
        """Give an occupant its turn. The turn of an action that is not preemptible ends with the action."""
        self._fresh.pop(running.waiting.id, None)
        occupant = self._renew(running)
        self._turns[running.waiting.id] = None
        self._due.push(occupant, until, running.waiting.seq)

    def recent(self, now: float, turn_s: float) -> list[Running]:
        """Return the occupants without a turn that have had their cores for less than a turn by now."""
        running = (occupant.running for occupant in self._occupants.values() if occupant.running.waiting.id not in self._turns)
        return [one for one in running if one.on_cores_since + turn_s > now and not one.stopping]

    def take_due(self, now: float) -> list[Running]:
        """Return each occupant that is to be refreshed by now, once. The caller must `offer` them."""
        due = [*self._fresh.values()]
        self._fresh.clear()
        while (at := self.next_due()) is not None and at <= now:
            occupant = self._due.pop()
            self._turns.pop(occupant.running.waiting.id, None)
            self._renew(occupant.running)
            due.append(occupant.running)
        return due

    def next_due(self) -> float | None:
        """Return when an occupant is to be refreshed."""
        first = self._due.first()
        return None if first is None else first[0]

    def first(self, deprioritised: Callable[[str], bool], may_lose: Callable[[Occupant], bool]) -> Occupant | None:
        """Return the occupant that loses its cores first, if it `may_lose` them. Deprioritised jobs lose cores before all others.

        Only the first occupant of each job is asked. If this occupant may not lose its cores, no occupant of its job does.
        """
        found: tuple[tuple[bool, int, float, int], Occupant] | None = None
        for job in tuple(self._order):
            heap = self._order[job]
            while (entry := heap.first()) is not None and entry[-1].running.stopping:
                heap.pop()
            if entry is None:
                del self._order[job]
                continue
            priority, rank, seq, _, occupant = entry
            if may_lose(occupant):
                order = (not deprioritised(job), priority, rank, seq)
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
