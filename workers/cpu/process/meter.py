"""What the processes of one command use: core-seconds, and memory as far as it was seen.

A shell's own counters include the children it has waited for, so a command of short-lived processes costs one read of
/proc before and one after it. Processes that are still running are added; those of earlier commands are not counted, nor
are orphans that ended before their command did. Memory is sampled while the command runs, the first time after
`FIRST_SAMPLE_S`, so a shorter peak is not seen.
"""

from __future__ import annotations

from collections.abc import Collection

from workers.cpu.process import tree

FIRST_SAMPLE_S = 0.02
SAMPLE_GROWTH = 3.0
LONGEST_SAMPLE_S = 0.5


class Meter:
    """Counts what runs below `keeper`, apart from `spared` processes of earlier commands."""

    def __init__(self, keeper: int, shell: int, spared: Collection[tree.Identity]) -> None:
        self._keeper, self._shell, self._spared = keeper, shell, spared
        before = tree.read_process(shell)
        self._before_s = before.cpu_s if before else 0.0
        self._last_s = 0.0
        self.max_rss_mb = 0.0
        self._interval_s = FIRST_SAMPLE_S

    def next_interval_s(self) -> float:
        """Return how long to wait for the next sample: often at first, for short commands, then seldom."""
        interval_s = self._interval_s
        self._interval_s = min(interval_s * SAMPLE_GROWTH, LONGEST_SAMPLE_S)
        return interval_s

    def sample(self) -> None:
        """Look at every living process once."""
        living = tree.descendants(self._keeper, self._spared)
        self._note_rss(sum(process.rss_bytes for process in living) / (1 << 20))
        self._last_s = sum(process.cpu_s for process in living) - self._before_s

    def over(self) -> float:
        """Return the core-seconds of a command whose shell waits for the next one."""
        self.sample()
        return max(0.0, self._last_s)

    def over_with_shell(self, ended_cpu_s: float, ended_rss_mb: float) -> float:
        """Return the core-seconds of a command that ended together with its shell, which used `ended_cpu_s` in all."""
        self._note_rss(ended_rss_mb)
        living = tree.descendants(self._keeper, self._spared)
        return max(0.0, ended_cpu_s + sum(process.cpu_s for process in living) - self._before_s)

    def lost(self) -> float:
        """Return the core-seconds as of the last sample, when the keeper and its counts are gone."""
        return max(0.0, self._last_s)

    def _note_rss(self, rss_mb: float) -> None:
        self.max_rss_mb = max(self.max_rss_mb, rss_mb)
