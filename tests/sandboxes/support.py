"""What several of these tests need: a clock, how a process is held back that no command in the foreground belongs to, and system calls."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.workers_cpu.support import cpu_groups, in_background, printed, until
from workers.cpu import weight
from workers.cpu.abstract import Environment, Sandbox

from .conftest import Kind

# Prints the error of each system call whose number and first two arguments are given.
CALLS = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
for call in sys.argv[1:]:
    number, first, second = map(int, call.split(","))
    ctypes.set_errno(0)
    answer = libc.syscall(ctypes.c_long(number), ctypes.c_long(first), ctypes.c_long(second), 0, 0, 0, 0)
    print(call, ctypes.get_errno() if answer == -1 else 0)
"""


@dataclass
class Clock:
    """The clock by which commands run out of time. It is put forward where a test would have to wait.

    Before that and afterwards one waits until the commands that run have looked at it. What they have done so far then has its time.
    """

    ahead_s: float = 0.0
    asked: int = 0

    def monotonic(self) -> float:
        self.asked += 1
        return time.monotonic() + self.ahead_s

    def forward(self, by_s: float) -> None:
        """Put it forward; the command runs on."""
        self.end(by_s)
        self._be_looked_at()

    def end(self, by_s: float) -> None:
        """Put it forward; the command is out of time."""
        self._be_looked_at()
        self.ahead_s += by_s

    def _be_looked_at(self) -> None:
        """Wait until a command has looked at it from its one poll to the next but one."""
        asked = self.asked
        assert until(lambda: self.asked > asked + 12)


def quota_of(pid: int) -> int:
    """Return the core-microseconds of each period that a process may use, below 0 for all."""
    files = [group / name for group in cpu_groups(pid) for name in ("cpu.cfs_quota_us", "cpu.max")]
    (said,) = [file.read_text().split()[0] for file in files if file.exists()]
    return -1 if said == "max" else int(said)


def counts_for(groups: Iterable[Path]) -> int:
    """Return for how many cores the first of some control groups that has a weight counts."""
    files = [(group / each.name, each) for group in groups for each in weight.WEIGHTS]
    return next(int(file.read_text()) // each.core for file, each in files if file.exists())


def weight_of(pid: int) -> int:
    return counts_for(cpu_groups(pid))


def is_held_back(kind: Kind, sandbox: Sandbox, pid: int) -> bool:
    """Say whether a process has next to nothing of a core, or only what others leave idle: as what commands left running does."""
    return quota_of(pid) > 0 if kind.parks else in_background(pid, sandbox.background)


def errors_of_calls(env: Environment, *calls: tuple[int, int, int]) -> dict[tuple[int, int, int], int]:
    env.write_file("calls.py", CALLS.encode())
    asked = " ".join(",".join(map(str, call)) for call in calls)
    lines = (line.split() for line in printed(env, f"python3 -S calls.py {asked}").splitlines())
    return {tuple(map(int, call.split(","))): int(number) for call, number in lines}  # type: ignore[misc]
