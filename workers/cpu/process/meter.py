"""What the processes of one command use: core-seconds, and memory as far as it was seen.

A process's own counters include the children it has waited for, and the supervisor waits for the shell and for every orphan.
So a command of short-lived processes costs two reads of /proc before and two after it; processes that are still running
are added, those of earlier commands are not counted, also when they end meanwhile. A running command is
sampled now and then. A peak of memory between two samples is not seen. Nor is what a process uses after the last sample, if it
ends and nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from workers.cpu.process import tree
from workers.cpu.process.groups import MemoryGroup
from workers.cpu.process.members import Members
from workers.cpu.shell.backend import Meter

LONGEST_SAMPLE_S, SAMPLE_COST_S = 0.5, 0.0005


class TreeMeter(Meter):
    """Counts what runs in `members`, apart from `spared` processes of earlier commands; `seen` gets the processes of each sample."""

    longest_s, sample_cost_s = LONGEST_SAMPLE_S, SAMPLE_COST_S

    def __init__(
        self,
        members: Members,
        spared: Collection[tree.Identity],
        seen: Callable[[Iterable[tree.Process]], None] = lambda living: None,
        memory: MemoryGroup | None = None,
    ) -> None:
        super().__init__()
        self._members, self._seen = members, seen
        self._spared = dict.fromkeys(spared, 0.0)
        self._memory = memory
        self._ended_before, self._full_before = (memory.oom_kills(), memory.watch()) if memory is not None else (0, 0)
        self._before_s = 0.0
        self._before_s = self._total_s(lambda: [process] if (process := tree.read_process(members.shell)) else [])[0]

    def baseline(self) -> list[float]:
        return [self._before_s, self._ended_before, self._full_before]

    def resume(self, baseline: Sequence[float], figures: Sequence[float]) -> None:
        super().resume(baseline, figures)
        self._before_s, self._ended_before, self._full_before = baseline[0], int(baseline[1]), int(baseline[2])

    def measure(self) -> float:
        # A child that has ended is in nobody's count until its parent has waited for it. Until then it is a zombie.
        total_s, found = self._total_s(lambda: self._members.with_zombies(self._spared))
        self._seen(found)
        self.note_rss(sum(process.rss_bytes for process in found) / (1 << 20))
        self.wants_core = any(map(tree.wants_core, found))
        return total_s

    def remark(self) -> str:
        if self._memory is None or (ended := self._memory.oom_kills() - self._ended_before) <= 0:
            return ""
        whose = f"the environment's {self._memory.memory_mb} MB of memory were" if self.was_full() else "the memory of the node was"
        return f"{whose} full: the kernel has ended {ended} of its processes"

    def was_full(self) -> bool:
        return self._memory is None or self._memory.was_full(self._full_before)

    def _total_s(self, find: Callable[[], Sequence[tree.Process]]) -> tuple[float, Sequence[tree.Process]]:
        """Return the core-seconds that are counted now, and the processes that run. If a spared one ends meanwhile, look once more."""
        added_s = -1.0
        while added_s != (known_s := self._of_spared()):
            added_s, found = known_s, find()
            supervisor = tree.read_process(self._members.supervisor)
        reaped_s = supervisor.reaped_s if supervisor is not None else 0.0
        return reaped_s + sum(process.cpu_s for process in found) - self._before_s - added_s, found

    def _of_spared(self) -> float:
        """Return what spared processes that have ended since have added to the counts of who waited for them."""
        added_s = 0.0
        for identity in self._spared:
            process = tree.read_process(identity[0])
            if process is not None and process.identity == identity:
                mine = process.parent in (self._members.shell, self._members.supervisor)
                self._spared[identity] = process.cpu_s if mine else 0.0
            else:
                added_s += self._spared[identity]
        return added_s
