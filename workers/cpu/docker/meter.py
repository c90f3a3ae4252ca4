"""What one command in a container uses: core-seconds from the session's group, memory as far as it was seen.

What an earlier command left running in the same session counts with it. A peak of memory between two samples is not seen.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence

from workers.cpu.docker.cgroups.abstract import SessionGroup
from workers.cpu.docker.container import Container
from workers.cpu.process import tree
from workers.cpu.shell.backend import Meter

LONGEST_SAMPLE_S, SAMPLE_COST_S = 0.1, 0.00005


class GroupMeter(Meter):
    """Counts what is used in `group` from now on."""

    longest_s, sample_cost_s = LONGEST_SAMPLE_S, SAMPLE_COST_S

    def __init__(self, container: Container, group: SessionGroup) -> None:
        super().__init__()
        self._container, self._group = container, group
        self._began = time.monotonic()
        self._disk_mb = max(container.written_mb, container.disk_mb)
        self._before_s, self._ended_before = group.cpu_s(), container.group.oom_kills()

    def baseline(self) -> list[float]:
        return [self._before_s, self._ended_before, self._began, self._disk_mb]

    def resume(self, baseline: Sequence[float], figures: Sequence[float]) -> None:
        super().resume(baseline, figures)
        self._before_s, self._ended_before, self._began, self._disk_mb = baseline[0], int(baseline[1]), baseline[2], baseline[3]

    def measure(self) -> float | None:
        """Measure once; a group that has gone is as it was at the last sample. See the base class."""
        with contextlib.suppress(OSError):
            found = list(filter(None, map(tree.read_process, self._group.processes())))
            self.note_rss(sum(process.rss_bytes for process in found) / (1 << 20))
            self.wants_core = any(map(tree.wants_core, found))
            return self._group.cpu_s() - self._before_s
        return None

    def remark(self) -> str:
        try:
            kills = self._container.group.oom_kills()
        except OSError:  # The group has gone with the container.
            return ""
        if self._container.is_ending():  # Kills that ended the container are left to `loss`.
            return ""
        self._container.oom_kills_reported = kills
        ended = kills - self._ended_before
        memory = f"the environment's {self._container.memory_mb} MB of memory were full"
        return f"{memory}: the kernel has ended {ended} of its processes" if ended > 0 else ""

    def disk_limit_exceeded(self) -> str:
        written_mb = self._container.written_mb
        if written_mb <= self._disk_mb:
            return ""
        self._container.note_disk_violation(self._began)
        self._disk_mb = float("inf")
        if math.isinf(written_mb):
            return "the environment has folders in folders deeper than is measured on disk"
        return f"the environment has written {written_mb:.0f} MB to disk, more than its {self._container.disk_mb} MB"
