"""`paper`: the published algorithm, nothing more.

1. Candidates first come, first served, as many as fit at their smallest amounts.
2. The units of the group given out with the least total duration, by dynamic programming.
3. Greedy eviction: the last candidate goes back to the queue and its units to the others; the change is kept if
   the estimated total ACT falls, and the first that does not help ends the search. The estimate is exact for the
   candidates; for the actions left waiting it walks a heap of expected completion times, down to `depth` actions.

One table of the programme holds the optimum for every prefix of the candidates. An eviction needs no new table.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from scheduler.choosing.abstract import Choice, Chooser
from scheduler.choosing.programme import Amounts, Programme
from scheduler.model import Waiting
from scheduler.model.group import Group


class Paper(Chooser):
    """The algorithm of arXiv 2603.13019, with `depth` waiting actions in the estimate."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.lookahead = depth

    def choose(self, candidates: Sequence[Waiting], behind: Sequence[Waiting], free: int, group: Group, now: float) -> list[Choice]:
        """Allocate by dynamic programming, then evict from the end while that lowers the estimate."""
        least = sum(waiting.least for waiting in candidates)
        useful = sum(waiting.units[-1] - waiting.least for waiting in candidates)
        if useful == 0:
            return [Choice(waiting, waiting.least) for waiting in candidates]
        # No prefix of the candidates can use more than the whole free room above its own smallest amounts.
        programme = Programme([Amounts(w.units, w.durations_s) for w in candidates], min(useful, free - candidates[0].least))
        ends = sorted((release.expected_end, release.units) for release in group.releases())
        kept, room = len(candidates), free - least
        chosen, estimate = self._estimate(programme, candidates, behind, kept, room, ends, now)
        while kept > 1:
            room += candidates[kept - 1].least
            fewer, lower = self._estimate(programme, candidates, behind, kept - 1, room, ends, now)
            if lower >= estimate - 1e-9:
                break
            kept, chosen, estimate = kept - 1, fewer, lower
        return [Choice(waiting, waiting.units[index]) for waiting, index in zip(candidates, chosen, strict=False)]

    def _estimate(
        self,
        programme: Programme,
        candidates: Sequence[Waiting],
        behind: Sequence[Waiting],
        kept: int,
        room: int,
        ends: Sequence[tuple[float, int]],
        now: float,
    ) -> tuple[list[int], float]:
        chosen = programme.best(kept, room)
        started = candidates[:kept]
        total = sum(waiting.durations_s[index] for waiting, index in zip(started, chosen, strict=True))
        heap = list(ends)
        heap.extend((now + w.durations_s[i], w.units[i]) for w, i in zip(started, chosen, strict=True))
        heapq.heapify(heap)
        free = room - sum(w.units[i] - w.least for w, i in zip(started, chosen, strict=True))
        waiting_ones = [*candidates[kept:], *behind]
        evicted = len(candidates) - kept
        return chosen, total + _waiting_s(waiting_ones[: max(self.depth, evicted)], heap, free, now)


def _waiting_s(waiting_ones: Sequence[Waiting], heap: list[tuple[float, int]], free: int, now: float) -> float:
    """Return the total ACT from `now` of actions that start, in order, as units come back; consumes `heap`."""
    at, total = now, 0.0
    for waiting in waiting_ones:
        while free < waiting.least and heap:
            end, units = heapq.heappop(heap)
            at, free = max(at, end), free + units
        if free < waiting.least:
            break
        free -= waiting.least
        end = at + waiting.durations_s[0]
        total += end - now
        heapq.heappush(heap, (end, waiting.least))
    return total
