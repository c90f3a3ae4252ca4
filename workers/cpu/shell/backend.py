"""Who owns the processes of a session: what a session asks of a backend, and what that reports.

A *backend* has one shell at a time, and every process that the shell's commands have started, however they hide. It
remembers which of them an earlier command left behind: a kill spares those.

| asked       | answer                                                                           |
|-------------|----------------------------------------------------------------------------------|
| `spawn`     | `Spawned`, then the shell reports on its FIFO; or `Refused`                      |
| `begin`     | the grant holds for all processes of the session from now on                     |
| `hold`      | another grant holds, while the command runs                                      |
| `signal`    | the command's processes have got a signal                                        |
| `kill`      | `Gone` once the command's processes have ended                                   |
| `park`      | what is left is in the background until the next `lend` or `begin`               |
| `lend`      | what is left may use these cores until the next `park` or `begin`                |
| `hang_up`   | everything ends, then `HungUp`                                                   |
| `abandon`   | what does not answer is ended by force, then `HungUp`                            |
| (unasked)   | `Exited` when the shell has ended by itself; `HungUp` when the backend was ended |

Threading: one thread at a time asks and reads events; `hold`, `lend`, `park` and `hang_up` may come from any.
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from signal import SIGKILL
from typing import ClassVar

from workers.cpu.abstract import Holding, Usage
from workers.cpu.handover.protocol import End
from workers.cpu.memory.allowance import Allowance
from workers.cpu.ports.network import Network
from workers.cpu.process import tree
from workers.cpu.shell.dialect import ProtocolFolder

TICKS_S = 0.02
"""By how much a figure of used time may be off."""

FIRST_SAMPLE_S, SAMPLE_GROWTH = 0.02, 3.0
SAMPLING_LOAD = 0.1
"""The part of a core that sampling all running commands of the worker may take."""

_CORES = os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Spawned:
    """The shell was started; `shell` is its process id as the worker sees it."""

    shell: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The shell could not be run."""

    reason: str


@dataclass(frozen=True, slots=True)
class Exited:
    """The shell has ended; `code` is 128 + n after signal n."""

    shell: int
    code: int
    max_rss_mb: float = 0.0


@dataclass(frozen=True, slots=True)
class Gone:
    """A kill is over; `left` are processes that did not die."""

    max_rss_mb: float = 0.0
    left: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class HungUp:
    """The backend is gone, and all that it held is or will be; `reason` says why where the environment stands all the same."""

    reason: str = ""


Event = Spawned | Refused | Exited | Gone | HungUp


class Meter(ABC):
    """Counts what one command uses, what it gets in the background, and how long it waits there.

    `usage` is as of the last sample, None before the first. It grows by what was used between two samples. The total of a sample can
    fall, since what a process has used is in nobody's count once it has ended and nobody waits for it. In the background
    a command waits for as many seconds as it gets fewer core-seconds: `waited_s`, as of the last sample. For a part of this time it
    may sleep by itself. `starved_s` is the time in which it wanted a core and had none: the time in which samples find `wants_core`, less
    the core-seconds that it got. This difference is right in the mean, so a later sample may lower it. The time in which its environment is
    paused for want of memory, by its `allowance`, counts for both. Any thread may ask and sample.

    A running command is sampled often at first, for short commands, then every `longest_s` seconds. All running commands
    together may cost `SAMPLING_LOAD` of a core, so where there are many the interval is longer; one sample takes about `sample_cost_s`.
    """

    longest_s: ClassVar[float]
    sample_cost_s: ClassVar[float]
    running: ClassVar[set[Meter]] = set()
    """The meters of the commands that run in this process now."""

    def __init__(self) -> None:
        self.usage: Usage | None = None
        self.max_rss_mb = self.waited_s = self.starved_s = 0.0
        self.wants_core = False
        """Whether a thread of the command wanted a core at the last sample; see `tree.wants_core`."""
        self._lock = threading.Lock()
        self._background = False
        self._sampled_at, self._found_s, self._ahead_s, self._lacked_s = 0.0, 0.0, 0.0, 0.0
        self._interval_s = FIRST_SAMPLE_S
        self._allowance: Allowance | None = None
        self._paused_s = 0.0

    def count_pauses(self, allowance: Allowance | None) -> None:
        """Count the pauses of the command's environment from now on."""
        self._allowance = allowance
        self._paused_s = allowance.paused_s() if allowance is not None else 0.0

    @property
    def waits(self) -> bool:
        """Whether the command is in the background, or paused."""
        return self._background or self._is_paused

    @property
    def _is_paused(self) -> bool:
        return self._allowance is not None and self._allowance.is_paused

    @property
    def last_s(self) -> float:
        """The core-seconds as of the last sample."""
        return self.usage.cpu_s if self.usage is not None else 0.0

    def note_rss(self, rss_mb: float) -> None:
        """Take note of memory that was seen in use."""
        self.max_rss_mb = max(self.max_rss_mb, rss_mb)

    def next_interval_s(self) -> float:
        """Return how long to wait for the next sample."""
        interval_s = self._interval_s
        longest_s = max(self.longest_s, len(Meter.running) * self.sample_cost_s / SAMPLING_LOAD)
        self._interval_s = min(interval_s * SAMPLE_GROWTH, longest_s)
        return interval_s

    @abstractmethod
    def measure(self) -> float | None:
        """Return the core-seconds that are counted now, None where there is no telling; take note of memory and `wants_core`."""

    def sample(self) -> None:
        """Take one sample."""
        with self._lock:
            self._sample()

    def set_background(self, background: bool) -> None:
        """Take note that the command is in the background from now on, or in the foreground."""
        with self._lock:
            if background or self._background:
                self._sample()
            self._background = background

    def _sample(self) -> None:
        wanted_core = self.wants_core
        found_s, now = self.measure(), time.monotonic()
        if self._is_paused:
            # A frozen process looks like one that cannot go on in the kernel. The pause is counted apart.
            self.wants_core = wanted_core
        passed_s, got_s = now - self._sampled_at, 0.0
        paused_s = self._paused_since_sample()
        self.waited_s += paused_s
        self.starved_s += paused_s
        self._lacked_s += paused_s
        if found_s is not None:
            # A sample can miss a process that the next one finds. No more was used than the machine has.
            got_s = min(max(0.0, found_s - self._found_s), passed_s * _CORES + TICKS_S)
            before, self._found_s = self.usage or Usage(cpu_s=0.0), found_s
            in_background_s = before.background_cpu_s + (got_s if self._background else 0.0)
            self.usage = Usage(cpu_s=before.cpu_s + got_s, background_cpu_s=in_background_s)
        if self._background:
            # What is counted in ticks of the clock can be a moment behind or ahead.
            behind_s = passed_s - paused_s - got_s - self._ahead_s
            self._ahead_s = min(-min(0.0, behind_s), TICKS_S)
            self.waited_s += max(0.0, behind_s)
            self._lacked_s += (passed_s - paused_s) * (wanted_core + self.wants_core) / 2 - min(got_s, passed_s)
            self.starved_s = min(self.waited_s, max(0.0, self._lacked_s))
        self._sampled_at = now

    def _paused_since_sample(self) -> float:
        if self._allowance is None:
            return 0.0
        self._allowance.sample()
        before_s, self._paused_s = self._paused_s, self._allowance.paused_s()
        return self._paused_s - before_s

    def figures(self) -> tuple[float, float, float, float, float]:
        """Return what a successor of this worker begins with, as of the last sample."""
        usage = self.usage or Usage(cpu_s=0.0)
        return usage.cpu_s, usage.background_cpu_s, self.waited_s, self.starved_s, self.max_rss_mb

    def baseline(self) -> list[float]:
        """Return what it counts from, where a successor of this worker is to be told."""
        return []

    def resume(self, baseline: Sequence[float], figures: Sequence[float]) -> None:
        """Go on counting where the worker before this one has stopped. What was used since is used in the foreground."""
        cpu_s, background_s, self.waited_s, self.starved_s, self.max_rss_mb = figures
        self._found_s, self._lacked_s, self._sampled_at = cpu_s, self.starved_s, 0.0
        self.usage = Usage(cpu_s=cpu_s, background_cpu_s=background_s)

    def over(self, ended_rss_mb: float = 0.0) -> float:
        """Return the core-seconds of a command that is over, `ended_rss_mb` being the memory of what has been reaped."""
        self.note_rss(ended_rss_mb)
        self.sample()
        return self.last_s

    def remark(self) -> str:
        """Return what a person should know of how the command fared, such as a limit that it ran into; else nothing."""
        return ""

    def was_full(self) -> bool:
        """Return whether it was its own memory that was full, where the remark says that the kernel ended processes for memory."""
        return True

    def disk_limit_exceeded(self) -> str:
        """Return why the command must be ended now, as it has gone beyond a limit that is only watched; else nothing."""
        return ""


class Backend(ABC):
    """Owns the processes of one session."""

    spared: frozenset[tree.Identity] = frozenset()
    """What earlier commands had left when the command began."""

    @abstractmethod
    def fileno(self) -> int:
        """Return the descriptor that is readable when there is an event."""

    @abstractmethod
    def events(self) -> Iterator[Event]:
        """Yield the events that have come; `HungUp` is the last one."""

    @abstractmethod
    def spawn(self, control: ProtocolFolder, cwd: str) -> None:
        """Ask for a shell that serves `control`, in the folder `cwd` or, when that is gone, in the session's home."""

    @abstractmethod
    def begin(self, holding: Holding) -> None:
        """Grant `holding` to all processes, and take note of those that earlier commands left behind."""

    def resume(self, holding: Holding, spared: Collection[tree.Identity]) -> None:
        """Grant `holding` to a command that runs, of the worker before this one."""
        self.spared = frozenset(spared)
        self.hold(holding)

    @abstractmethod
    def hold(self, holding: Holding) -> None:
        """Change the grant of the running command."""

    @abstractmethod
    def park(self) -> None:
        """Send whatever has outlived the command to the background."""

    @abstractmethod
    def lend(self, holding: Holding) -> None:
        """Have what was parked use the cores of commands that run in other sessions of the environment."""

    @abstractmethod
    def meter(self) -> Meter:
        """Return a meter for the command that has just begun."""

    @abstractmethod
    def kill(self, grace_s: float) -> None:
        """Ask that the command's processes end, the shell among them: by SIGTERM, after `grace_s` seconds by SIGKILL."""

    @abstractmethod
    def command_processes(self) -> list[tree.Process]:
        """Return the living processes of the session but those that earlier commands have left; the shell is one of them."""

    @abstractmethod
    def runs_something(self) -> bool:
        """Return whether a process of the session lives that is not the shell."""

    def signal(self, shell: int, number: int) -> None:
        """Send a signal to the processes that the command has started; an interrupt is sent by `workers/cpu/shell/interrupt.py`.

        The shell gets it too where it handles it, where nothing else is there, and where it is to be killed.
        """
        living = self.command_processes()
        others = [process for process in living if process.pid != shell]
        for process in living if not others or number == SIGKILL or tree.handles(shell, number) else others:
            tree.send(process, number)

    @abstractmethod
    def network(self) -> Network | None:
        """Return the network in which servers of the session listen; None before its first shell."""

    @abstractmethod
    def folder(self) -> str | None:
        """Return the folder that the shell is in; None where there is no telling."""

    @abstractmethod
    def hang_up(self) -> None:
        """Tell everything to end; returns at once."""

    @abstractmethod
    def has_ended(self, timeout_s: float) -> bool:
        """Wait until nothing is left after `hang_up`, for `timeout_s` at most; takes no events."""

    def abandon(self) -> bool:
        """End by force what does not answer; then `HungUp` follows. False where there is no such thing to end."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Give descriptors back."""


class Backends(ABC):
    """Where the sessions of an environment get their backends; `allowance` is its memory, where it can be paused for want of it."""

    allowance: Allowance | None = None

    @property
    def is_paused(self) -> bool:
        """Whether the environment is paused for want of memory, or awake only while something in it is started or ended."""
        return self.allowance is not None and self.allowance.is_short

    def paused_s(self) -> float:
        """Return for how many seconds the environment has been paused so far."""
        return self.allowance.paused_s() if self.allowance is not None else 0.0

    def awake(self) -> AbstractContextManager[None]:
        """Have nothing of the environment paused for want of memory while something is started or ended."""
        return self.allowance.awake() if self.allowance is not None else nullcontext()

    @abstractmethod
    def backend(self, control: ProtocolFolder) -> Backend:
        """Return a fresh backend for the session that `control` serves. Raises `SessionUnavailable`."""

    @abstractmethod
    def adopt(self, control: ProtocolFolder, end: End | None) -> tuple[Backend, int, Exited | None] | None:
        """Return a backend that the worker before this one has left, with its shell, or with 0 and how that has ended.

        `end` is what is kept of a supervisor. Returns None where there is none. Raises `SandboxError` or `OSError`.
        """

    @property
    @abstractmethod
    def keeps(self) -> bool:
        """Whether sessions can outlive this worker."""

    @abstractmethod
    def keep(self, control: str, descriptors: Mapping[str, int]) -> None:
        """Have descriptors of the session with the protocol folder `control` outlive this worker, by name.

        Something left running still writes to a stream in the place of which another one comes.
        """

    def oom_kills(self) -> int:
        """Return how many processes of the environment the kernel has ended for want of memory; 0 where that is not bounded."""
        return 0

    def loss(self) -> str:
        """Return why the environment has ended by itself; nothing while it stands, or where it was closed."""
        return ""

    def loss_cause(self) -> str:
        """Return the cause of that, where it has (`tangram/ends.py`)."""
        return "environment_lost"
