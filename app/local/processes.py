"""Child processes of the embedded stack: each in a session of its own, with a log, stopped without leftovers.

Knows processes and nothing of what they run. A child is reaped only once its process group is dead. Until then
it is a zombie, and its number cannot be given to another process. So a signal cannot hit a stranger.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen
from typing import Any, ClassVar, Self

import psutil

from tangram.errors import TangramError

FIRST_POLL_S, LONGEST_POLL_S, POLL_GROWTH = 0.005, 0.05, 1.3
"""Pauses between two looks at what is waited for. Looks cost CPU time that processes need which are starting."""

KILL_WAIT_S = 5.0
# psutil derives start times from the clock's ticks since boot; two readings may differ by rounding.
SAME_START_S = 1.0


METRICS_PORT = "TANGRAM_METRICS_PORT"
"""A variable that each process of a stack has for itself, and none takes over from whoever starts it."""

METRICS_HOST = "127.0.0.1"
"""Where the processes of a stack serve their metrics."""


class StackError(TangramError):
    """Raised when the embedded stack, or a part of it, cannot be started; the message is one line for a person."""


@dataclass(frozen=True, slots=True)
class Command:
    """What to run: a name for logs and messages, the arguments, variables on top of the stack's, and the signal that ends it."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    ended_by: signal.Signals = signal.SIGTERM


@dataclass(frozen=True, slots=True)
class Identity:
    """A process for good, as numbers are used again: its number, the `boot` of the machine, and when it started (seconds since that)."""

    pid: int
    started_s: float
    boot: str

    @classmethod
    def of(cls, pid: int) -> Self:
        """Return that of a process. Raises `psutil.Error`."""
        return cls(pid, _started_s(psutil.Process(pid)), this_boot())

    def find(self) -> psutil.Process | None:
        """Return the process where it still lives; None where it is gone or its number is another's."""
        with suppress(psutil.Error):
            process = psutil.Process(self.pid)
            is_same = self.boot == this_boot() and abs(_started_s(process) - self.started_s) <= SAME_START_S
            return process if is_same and _lives(process) else None
        return None


def this_boot() -> str:
    """Return what names the boot of the machine; nothing where the system has no name for it."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _started_s(process: psutil.Process) -> float:
    # create_time() is the boot, as the clock has it, and the seconds since. The boot moves when the clock is set.
    booted_at = psutil.boot_time()
    return process.create_time() - booted_at


class Process:
    """A child with a log. The log of the stack's run before is kept as `log` + `.1`; a restart adds to what is there."""

    start_child: ClassVar[type[Popen[Any]]] = Popen
    """Starts the child; a subclass may start it otherwise."""

    def __init__(self, command: Command, *, log: Path, env: Mapping[str, str]) -> None:
        """Start `command` with the environment `env`. Raises `StackError` when its log cannot be written or its program cannot be run."""
        self.name = command.name
        self.log = log
        self._command = command
        self._env = {**env, **command.env}
        with self._start_errors():
            log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if log.exists():
                log.replace(log.with_name(log.name + ".1"))
        self._start()

    def restart(self) -> None:
        """Start a process that has ended once more. Raises as the constructor."""
        self.stop(0.0)
        self._start()

    def _start(self) -> None:
        with self._start_errors(), open(self.log, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as output:
            self._child = self.start_child(
                self._command.argv,
                stdin=DEVNULL,
                stdout=output,
                stderr=STDOUT,
                env=self._env,
                start_new_session=True,
            )
        self.identity = Identity.of(self._child.pid)
        self._asked = False
        self._family: set[psutil.Process] = set()

    @contextmanager
    def _start_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StackError(f"cannot start {self.name}: {describe(error)}") from error

    def ended(self) -> str | None:
        """Say how the process ended, e.g. `exit code 1` or `signal SIGKILL`; None while it runs."""
        if self._child.returncode is not None:
            return _spell(self._child.returncode)
        # WNOWAIT leaves the zombie, see the head of this file.
        outcome = os.waitid(os.P_PID, self.identity.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if outcome is None:
            return None
        return _spell(outcome.si_status if outcome.si_code == os.CLD_EXITED else -outcome.si_status)

    def log_tail(self, lines: int = 10) -> tuple[str, ...]:
        """Return the last non-empty lines that the process printed."""
        with suppress(OSError), self.log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 64 * 1024))
            text = log.read().decode("utf-8", "replace")
            return tuple([line.rstrip() for line in text.splitlines() if line.strip()][-lines:])
        return ()

    def ask(self) -> None:
        """Ask the process to end and return at once; asked twice, a Celery worker would drop what it does."""
        if self._asked or self._child.returncode is not None:
            return
        # Before it ends: whom it leaves behind is nobody's descendant afterwards.
        self._family = _descendants(self.identity)
        if self.ended() is None:
            os.kill(self.identity.pid, self._command.ended_by)
        self._asked = True

    def stop(self, wait_s: float) -> None:
        """Ask the process to end, wait at most `wait_s`, then kill its group and all descendants."""
        if self._child.returncode is not None:
            return
        self.ask()
        self._family |= _descendants(self.identity)  # it may have been asked some time ago
        try:
            wait_until(lambda: self.ended() is not None, wait_s)
        finally:
            family = self._family | _descendants(self.identity)
            # The group of a zombie cannot be signalled on macOS, and need not be.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.identity.pid, signal.SIGKILL)
            _kill(family)
            self._child.wait()


def stop_stranger(identity: Identity, wait_s: float) -> bool:
    """Stop a process that is not our child, with its descendants; say whether it was still there."""
    process = identity.find()
    if process is None:
        return False
    family = _descendants(identity)
    with suppress(psutil.NoSuchProcess):
        process.terminate()
    wait_until(lambda: not _lives(process), wait_s)
    _kill(family | _descendants(identity) | {process})
    return True


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Wait until `condition` holds, at most `timeout_s`; say whether it did."""
    deadline, pause_s = time.monotonic() + timeout_s, FIRST_POLL_S
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(pause_s * POLL_GROWTH, LONGEST_POLL_S)
    return True


def busy_elsewhere_s() -> float:
    """Return the core-seconds so far in which the cores of this process were busy with others than it and its ended children."""
    here = os.sched_getaffinity(0)
    busy = sum(sum(times) - times.idle - times.iowait for core, times in enumerate(psutil.cpu_times(percpu=True)) if core in here)
    return float(busy - sum(os.times()[:4]))


def describe(error: OSError) -> str:
    """Say in one line what the system refused, and for which file."""
    reason = error.strerror or str(error)
    return f"{reason}: {error.filename}" if error.filename else reason


def _descendants(identity: Identity) -> set[psutil.Process]:
    process = identity.find()
    with suppress(psutil.Error):
        return set(process.children(recursive=True)) if process else set()
    return set()


def _kill(processes: Iterable[psutil.Process]) -> None:
    family = list(processes)
    for process in family:
        with suppress(psutil.Error):
            process.kill()
    wait_until(lambda: not any(_lives(process) for process in family), KILL_WAIT_S)


def _lives(process: psutil.Process) -> bool:
    # A zombie is dead; not every container has an init that reaps it, so waiting for it to vanish could take forever.
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _spell(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
