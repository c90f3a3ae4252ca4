"""What the processes of one command use: core-seconds, and memory as far as it was seen.

A process's own counters include the children it has waited for, and the keeper waits for the shell and for every orphan;
in a session that is set apart from the host, the init inside waits for the orphans.
So a command of short-lived processes costs two reads of /proc before and two after it; processes that are still running
are added, those of earlier commands are not counted, also when they end meanwhile. While a command runs it is looked at
now and then, the first time after `FIRST_SAMPLE_S`; a peak of memory between two looks is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from workers.cpu.process import tree
from workers.cpu.process.members import Members
from workers.cpu.shell.warden import Meter

FIRST_SAMPLE_S = 0.02
SAMPLE_GROWTH = 3.0
LONGEST_SAMPLE_S = 0.5


class TreeMeter(Meter):
    """Counts what runs in `members`, apart from `spared` processes of earlier commands; `seen` is told what it finds."""

    def __init__(
        self,
        members: Members,
        spared: Collection[tree.Identity],
        seen: Callable[[Iterable[tree.Process]], None] = lambda living: None,
    ) -> None:
        super().__init__()
        self._members, self._seen = members, seen
        self._spared = dict.fromkeys(spared, 0.0)
        self._before_s = 0.0
        self._before_s = self._total_s([process] if (process := tree.read_process(members.shell)) else [])
        self._interval_s = FIRST_SAMPLE_S

    def next_interval_s(self) -> float:
        """Return how long to wait for the next sample: often at first, for short commands, then seldom."""
        interval_s = self._interval_s
        self._interval_s = min(interval_s * SAMPLE_GROWTH, LONGEST_SAMPLE_S)
        return interval_s

    def look(self) -> float:
        """Look at every living process once; see the base class."""
        living = self._members.living(self._spared)
        self._seen(living)
        self.note_rss(sum(process.rss_bytes for process in living) / (1 << 20))
        # A child that has ended is in nobody's count until its parent has waited for it.
        return self._total_s(living)

    def _total_s(self, living: Collection[tree.Process]) -> float:
        buriers = map(tree.read_process, self._members.roots)
        reaped_s = sum(burier.reaped_s for burier in buriers if burier is not None)
        return reaped_s + sum(process.cpu_s for process in living) - self._before_s - self._of_spared()

    def _of_spared(self) -> float:
        """Return what spared processes that have ended since have added to the counts of who waited for them."""
        added_s = 0.0
        for identity in self._spared:
            process = tree.read_process(identity[0])
            if process is not None and process.identity == identity:
                mine = process.parent == self._members.shell or process.parent in self._members.roots
                self._spared[identity] = process.cpu_s if mine else 0.0
            else:
                added_s += self._spared[identity]
        return added_s
