"""What one live replay of `bench.live` came to, under whichever system, and what it says as JSON.

The keys of `Replayed` are what the child process of a Ray replay prints and what `bench.live --json` shows per round.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import fsum
from pathlib import Path

from scheduler.model.stats import summary

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
WINDOW_S = 1.0
FULL = 0.8
"""The part of the machine's core-seconds from which on cores count as short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """Figures of one replay, in seconds.

    `mean_execution` is the commands' own time, so the rest of `mean_act` is waiting and what the system costs. `cpu_s` is
    the CPU time of the commands, `machine_s` that of everything on the machine meanwhile: what lies between them is the
    system's own and that of strangers. `short` is the part of the time in which the machine's cores were more than `FULL` busy.
    """

    system: str
    actions: int
    failed: int
    mean_act: float
    p50_act: float
    p95_act: float
    mean_execution: float
    step_duration: float
    cpu_s: float
    machine_s: float
    short: float = 0.0
    resizes: int = 0

    @classmethod
    def of(
        cls, system: str, acts: Sequence[Act], step_duration: float, machine_s: float, *, short: float = 0.0, resizes: int = 0
    ) -> Replayed:
        """Sum up the actions of a replay."""
        spread = summary(act.act_s for act in acts)
        count = max(1, len(acts))
        return cls(
            system=system,
            actions=len(acts),
            failed=sum(not act.succeeded for act in acts),
            mean_act=fsum(act.act_s for act in acts) / count,
            p50_act=spread.p50,
            p95_act=spread.p95,
            mean_execution=fsum(act.execution_s for act in acts) / count,
            step_duration=step_duration,
            cpu_s=fsum(act.cpu_s for act in acts),
            machine_s=machine_s,
            short=short,
            resizes=resizes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """One action: submission to result, the command's own time, its CPU time."""

    act_s: float
    execution_s: float
    cpu_s: float
    succeeded: bool


class MachineMeter:
    """Counts the CPU time of the whole machine from its making to its last `look`.

    Between two looks that are at least `WINDOW_S` apart lies a window, in which cores were short or were not.
    """

    def __init__(self) -> None:
        self._began = self._latest = self._window_busy = _busy_s()
        self._window_at = time.monotonic()
        self._short_s = self._seen_s = 0.0

    def look(self) -> None:
        """Take note of now."""
        self._latest = _busy_s()
        now = time.monotonic()
        window_s = now - self._window_at
        if window_s >= WINDOW_S:
            busy = (self._latest - self._window_busy) / (window_s * (os.cpu_count() or 1))
            self._seen_s += window_s
            self._short_s += window_s if busy > FULL else 0.0
            self._window_at, self._window_busy = now, self._latest

    @property
    def used_s(self) -> float:
        """Core-seconds used so far."""
        return self._latest - self._began

    @property
    def short(self) -> float:
        """The part of the time in which cores were short."""
        return self._short_s / self._seen_s if self._seen_s > 0 else 0.0


def metered(meters: list[MachineMeter]) -> Callable[[int], Callable[[], None]]:
    """Return what a replay takes as its progress: a meter, added to `meters`, from the first action to the last result."""

    def begin(total: int) -> Callable[[], None]:
        meters.append(MachineMeter())
        return meters[-1].look

    return begin


def _busy_s() -> float:
    """Return the time that all cores together have been busy: user, nice, system, irq, softirq."""
    line = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0]
    user, nice, system, _idle, _iowait, irq, softirq = (int(word) for word in line.split()[1:8])
    return (user + nice + system + irq + softirq) / TICKS_PER_S
