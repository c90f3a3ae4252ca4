"""The waiting actions of one group, in the policy's order, a queue for each job.

Within a job the order is that of `Waiting.key`. The same order holds between jobs, but the actions of jobs beyond their share come
last (`Walk`). Keys are distinct, since each ends with the order of arrival.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from scheduler.model import Waiting


class JobQueue:
    """The waiting actions of one job, sorted."""

    def __init__(self) -> None:
        self._keys: list[tuple[float, ...]] = []
        self.items: list[Waiting] = []

    def __contains__(self, waiting: Waiting) -> bool:
        at = bisect_left(self._keys, waiting.key)
        return at < len(self.items) and self.items[at] is waiting

    def add(self, waiting: Waiting) -> None:
        """Insert in order."""
        at = bisect_left(self._keys, waiting.key)
        self._keys.insert(at, waiting.key)
        self.items.insert(at, waiting)

    def remove(self, waiting: Waiting) -> bool:
        """Take out; False where it is not in this queue."""
        at = bisect_left(self._keys, waiting.key)
        if at == len(self.items) or self.items[at] is not waiting:
            return False
        del self._keys[at], self.items[at]
        return True


class WaitQueue:
    """Queues by job, in the order in which the jobs came."""

    def __init__(self) -> None:
        self.by_job: dict[str, JobQueue] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Waiting]:
        return merged([self])

    def __contains__(self, waiting: Waiting) -> bool:
        queue = self.by_job.get(waiting.action.job)
        return queue is not None and waiting in queue

    def add(self, waiting: Waiting) -> None:
        """Insert in order."""
        queue = self.by_job.get(waiting.action.job)
        if queue is None:
            queue = self.by_job[waiting.action.job] = JobQueue()
        queue.add(waiting)
        self._count += 1

    def remove(self, waiting: Waiting) -> bool:
        """Take out; False where it is not in this queue."""
        queue = self.by_job.get(waiting.action.job)
        if queue is None or not queue.remove(waiting):
            return False
        self._count -= 1
        if not queue.items:
            del self.by_job[waiting.action.job]
        return True


class Contenders(WaitQueue):
    """A queue of actions that want cores, which also knows which action has wanted them for longest.

    An action that moves in the queue (`remove`, `add`) keeps its waiting time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rank_again_at = 0.0
        self._since: list[tuple[float, int, Waiting]] = []
        """The actions that have entered, by the start of their wait. Some entries are stale: the action is gone, or waits since
        another time."""

    def enter(self, waiting: Waiting, since: float) -> None:
        """Insert an action that has wanted cores since then."""
        self.add(waiting)
        waiting.contends_since = since
        if len(self._since) > 2 * len(self) + 64:
            self._since = [entry for entry in self._since if self._counts(entry)]
        at = bisect_left(self._since, (since, waiting.seq))
        if at == len(self._since) or self._since[at][2] is not waiting:
            self._since.insert(at, (since, waiting.seq, waiting))

    def starving(self, now: float, for_s: float) -> Iterator[Waiting]:
        """Walk the actions that have wanted cores for at least `for_s` seconds, the longest wait first."""
        gone = next((at for at, entry in enumerate(self._since) if self._counts(entry)), len(self._since))
        del self._since[:gone]
        for entry in islice(self._since, self._coming(now, for_s)):
            if self._counts(entry):
                yield entry[2]

    def next_starving(self, now: float, for_s: float) -> float | None:
        """Return when the next action will have wanted cores for `for_s` seconds; None if no action is to come."""
        entries = islice(self._since, self._coming(now, for_s), None)
        return next((entry[0] + for_s for entry in entries if self._counts(entry)), None)

    def _coming(self, now: float, for_s: float) -> int:
        # The same sum as in `next_starving`: a difference may round in another way.
        return bisect_right(self._since, now, key=lambda entry: entry[0] + for_s)

    def _counts(self, entry: tuple[float, int, Waiting]) -> bool:
        return entry[2].contends_since == entry[0] and entry[2] in self


def merged(queues: Sequence[WaitQueue]) -> Iterator[Waiting]:
    """Walk queues in one order. No queue may change before the walk is over."""
    sorted_items = [of_job.items for queue in queues for of_job in queue.by_job.values()]
    if len(sorted_items) == 1:
        return iter(sorted_items[0])
    return heapq.merge(*sorted_items, key=lambda waiting: waiting.key)


class Walk:
    """A walk over queues. Actions of jobs beyond their share come last, even if a job passes its share during the walk.

    `last` says whether an action comes last; `skip` leaves a job out for the rest of the walk. Take nothing out of the queues
    before the walk is over.
    """

    def __init__(self, queues: Sequence[WaitQueue], last: Callable[[Waiting], bool]) -> None:
        self._last = last
        self._rest: dict[str, Iterator[Waiting]] = {}
        jobs = dict.fromkeys(job for queue in queues for job in queue.by_job)
        for job in jobs:
            items = [queue.by_job[job].items for queue in queues if job in queue.by_job]
            self._rest[job] = iter(items[0]) if len(items) == 1 else heapq.merge(*items, key=lambda waiting: waiting.key)
        self._heads = [self._entry(job, next(rest)) for job, rest in self._rest.items()]
        heapq.heapify(self._heads)

    def __iter__(self) -> Iterator[Waiting]:
        return self

    def __next__(self) -> Waiting:
        while self._heads:
            _, _, job, head = self._heads[0]
            if job not in self._rest:
                heapq.heappop(self._heads)
                continue
            # Taking cores may move another job beyond its share, or back. So the first action of a job is looked at again when it
            # comes up.
            entry = self._entry(job, head)
            if entry[0] != self._heads[0][0]:
                heapq.heapreplace(self._heads, entry)
                continue
            following = next(self._rest[job], None)
            if following is None:
                heapq.heappop(self._heads)
                del self._rest[job]
            else:
                heapq.heapreplace(self._heads, self._entry(job, following))
            return head
        raise StopIteration

    def _entry(self, job: str, head: Waiting) -> tuple[bool, tuple[float, ...], str, Waiting]:
        return self._last(head), head.key, job, head

    def skip(self, job: str) -> None:
        """Leave the rest of a job's actions out."""
        self._rest.pop(job, None)
