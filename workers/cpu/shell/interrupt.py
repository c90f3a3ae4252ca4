"""An interrupt (SIGINT) of a command: which processes get it, and which are followed because they may lose it.

All processes of the command get it, the shell among them. bash ends a command line only if it gets the interrupt itself: a program that
has ended may have ended by itself. A program gets the interrupt once, as it may handle it. The shell and its copies are followed. A copy
is a process that was forked and runs no program of its own yet:

| it | then |
|---|---|
| becomes a program | gets the interrupt again: between fork and exec it was taken for the shell's own, and forgotten with the exec |
| spins in its handler | is killed: nothing else ends it |
| sleeps, runs on, or ends | has understood; a copy that does so is a subshell |

bash 5.2 spins for ever where an interrupt comes just as it begins to wait for a child (`wait_for` in its `jobs.c`). Its handler is in
place then. The handler sends the signal again, for the handler before it, but does not know that one yet. So SIGINT is pending again and
again although nobody else sends it, and is mostly blocked in between. The process uses a core and never sleeps.

How long all this takes depends on the machine. So nothing is bounded by time, but by what a process does and by the CPU time that it gets.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from signal import SIGINT, SIGKILL

from workers.cpu.process import tree

INTERRUPTED = 128 + SIGINT
"""The exit code of what an interrupt has ended."""

SPIN_CPU_S, SPIN_RETURNS = 0.2, 3
"""A shell spins that has used so much CPU time since the interrupt, and at which the signal has come back so often."""

OUTSIDE_LOOKS = 12
"""A shell does not spin once so many looks in a row have found SIGINT neither blocked nor pending, as a sixth do at one that spins."""

COPY_CPU_S = 0.2
"""After so much CPU time a copy is a subshell. From fork to exec it needs some milliseconds."""

ASLEEP_LOOKS = 3
"""A copy is a subshell once it slept at so many looks in a row."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _GROWTH = 0.002, 0.1, 1.5


@dataclass(slots=True)
class _Shell:
    """The shell or a copy, with its CPU time when it was interrupted, and what looks have found since.

    `asleep` and `outside` count looks in a row. `returns` counts how often the signal was pending again.
    """

    cpu_s: float
    is_copy: bool
    may_spin: bool = True
    was_pending: bool = True
    asleep: int = 0
    outside: int = 0
    returns: int = 0

    def look(self, process: tree.Process) -> None:
        """Take note of what it does."""
        is_blocked, is_pending = tree.blocks(process.pid, SIGINT)
        self.asleep = self.asleep + 1 if process.state == "S" else 0
        self.outside = 0 if is_blocked or is_pending else self.outside + 1
        self.returns += is_pending and not self.was_pending
        self.was_pending = is_pending
        self.may_spin &= not self.asleep and self.outside < OUTSIDE_LOOKS


class Interrupt:
    """One interrupt, sent as this is made. `look` is to be called at `look_at` of the monotonic clock: never, once all have understood."""

    def __init__(self, processes: Callable[[], list[tree.Process]], shell: int) -> None:
        """Interrupt `processes`, which lists those of the command now, among them that of `shell`."""
        self._processes, self._shell = processes, shell
        self._own = tree.command_line(shell)
        living = processes()
        self._followed = {p.identity: _Shell(p.cpu_s, p.pid != shell) for p in living if tree.command_line(p.pid) == self._own}
        for process in living:
            tree.send(process, SIGINT)
        # What was forked meanwhile has not got it, and was forked by a shell that had not got it.
        now, interrupted = tree.now_ticks(), {process.identity for process in living}
        for process in processes():
            if process.identity not in interrupted and process.start <= now:
                tree.send(process, SIGINT)
                self._followed[process.identity] = _Shell(process.cpu_s, is_copy=True)
        self._pause_s = _FIRST_PAUSE_S
        self.look_at = time.monotonic() + self._pause_s

    def look(self) -> bool:
        """Look after those that are followed; return whether the shell was killed."""
        was_killed = False
        living = {process.identity: process for process in self._processes() if process.identity in self._followed}
        for identity in tuple(self._followed):
            if (process := living.get(identity)) is None or self._has_understood(process, self._followed[identity]):
                del self._followed[identity]
            elif self._spins(process, self._followed[identity]):
                tree.send(process, SIGKILL)
                del self._followed[identity]
                was_killed |= process.pid == self._shell
        self._pause_s = min(_GROWTH * self._pause_s, _LONGEST_PAUSE_S)
        self.look_at = time.monotonic() + self._pause_s if self._followed else math.inf
        return was_killed

    def _has_understood(self, process: tree.Process, followed: _Shell) -> bool:
        """Return whether a process needs no look any more. One that has become a program gets the interrupt again."""
        if tree.command_line(process.pid) != self._own:
            if followed.is_copy:
                tree.send(process, SIGINT)
            return True
        followed.look(process)
        if followed.may_spin:
            return False
        return not followed.is_copy or followed.asleep >= ASLEEP_LOOKS or process.cpu_s > followed.cpu_s + COPY_CPU_S

    def _spins(self, process: tree.Process, followed: _Shell) -> bool:
        return followed.may_spin and followed.returns >= SPIN_RETURNS and process.cpu_s > followed.cpu_s + SPIN_CPU_S
