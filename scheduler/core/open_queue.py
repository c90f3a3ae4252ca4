"""The `cpu.open` actions that wait for a node, indexed so that the next is found quickly.

Opens of a job with the same needs, apart from memory, stand in one queue. Each size of memory has its own queue beside it. So the
first open that fits into a given memory is found among the heads of the sizes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from scheduler.model import Waiting
from scheduler.model.queue import JobQueue
from scheduler.model.state import is_elastic
from tangram.action import CORES, MEMORY_MB


@dataclass(frozen=True, slots=True)
class Needs:
    """An environment's needs of a node, apart from its memory: labels, `cores` in all, and free cores for its pod.

    An `elastic` environment is granted its memory as it uses it.
    """

    requires: tuple[str, ...]
    cores: int
    pod_cores: int
    elastic: bool


class _Alike:
    """The waiting opens of one job with the same needs, in order."""

    def __init__(self) -> None:
        self.queue = JobQueue()
        self._sizes: list[int] = []
        self._by_size: dict[int, JobQueue] = {}

    def add(self, waiting: Waiting) -> None:
        self.queue.add(waiting)
        size = waiting.action.cost.least(MEMORY_MB)
        if size not in self._by_size:
            self._sizes.insert(bisect_left(self._sizes, size), size)
            self._by_size[size] = JobQueue()
        self._by_size[size].add(waiting)

    def remove(self, waiting: Waiting) -> bool:
        if not self.queue.remove(waiting):
            return False
        size = waiting.action.cost.least(MEMORY_MB)
        self._by_size[size].remove(waiting)
        if not self._by_size[size].items:
            del self._by_size[size]
            del self._sizes[bisect_left(self._sizes, size)]
        return True

    def first_within(self, memory_mb: int) -> Waiting | None:
        if self._sizes[0] > memory_mb:
            return None
        head = self.queue.items[0]
        if head.action.cost.least(MEMORY_MB) <= memory_mb:
            return head
        sizes = self._sizes[: bisect_right(self._sizes, memory_mb)]
        return min((self._by_size[size].items[0] for size in sizes), key=lambda waiting: waiting.key)


class OpenQueue:
    """Waiting opens by needs and job. `pod_cores` are the cores that the policy gives each environment, 0 for none."""

    def __init__(self, pod_cores: int) -> None:
        self._pod_cores = pod_cores
        self._by_needs: dict[Needs, dict[str, _Alike]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, waiting: Waiting) -> bool:
        alike = self._by_needs.get(self.needs_of(waiting), {}).get(waiting.action.job)
        return alike is not None and waiting in alike.queue

    def needs_of(self, waiting: Waiting) -> Needs:
        """Return an open's needs of a node. A pod has at least the cores of the largest action of its trajectory."""
        cores = waiting.action.cost.least(CORES)
        pod_cores = max(self._pod_cores, cores) if self._pod_cores else 0
        return Needs(waiting.action.requires, max(1, pod_cores, cores), pod_cores, is_elastic(waiting.action))

    def add(self, waiting: Waiting) -> None:
        """Insert in order."""
        jobs = self._by_needs.setdefault(self.needs_of(waiting), {})
        jobs.setdefault(waiting.action.job, _Alike()).add(waiting)
        self._count += 1

    def remove(self, waiting: Waiting) -> bool:
        """Take out; False where it is not in this queue."""
        needs, job = self.needs_of(waiting), waiting.action.job
        jobs = self._by_needs.get(needs, {})
        alike = jobs.get(job)
        if alike is None or not alike.remove(waiting):
            return False
        self._count -= 1
        if not alike.queue.items:
            del jobs[job]
        if not jobs:
            del self._by_needs[needs]
        return True

    def heads(self) -> Iterator[Waiting]:
        """Return the first open of each queue."""
        return (alike.queue.items[0] for jobs in self._by_needs.values() for alike in jobs.values())

    def fitting(self, most_mb: Callable[[Needs, str], int]) -> Iterator[Waiting]:
        """Return the first fitting open of each queue. `most_mb` gives the largest `memory_mb` for the needs of an open of a job."""
        for needs, jobs in self._by_needs.items():
            for job, alike in jobs.items():
                found = alike.first_within(most_mb(needs, job))
                if found is not None:
                    yield found
