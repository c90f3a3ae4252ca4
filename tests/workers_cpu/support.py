"""What several of these tests need: run a command, find processes, wait for a condition."""

from __future__ import annotations

import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatch
from multiprocessing import get_context
from multiprocessing.connection import Connection, Pipe
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest

from app.local.processes import wait_until
from workers.cpu import weight
from workers.cpu.abstract import Environment, EnvironmentSpec, ExecOutcome, ExecRequest, Execution, Holding, Sandbox
from workers.cpu.process import tree
from workers.cpu.process.environment import ProcessEnvironment
from workers.cpu.process.sandbox import ProcessSandbox
from workers.cpu.weight import Means

HERE = sorted(os.sched_getaffinity(0))
"""The cores that this process may use."""
needs_two_cores = pytest.mark.skipif(len(HERE) < 2, reason="moving a process between cores needs two of them")

RUN = f"{secrets.randbelow(10**7):07d}"
"""Random digits at the end of the seconds that a process of these tests sleeps. Each run finds its own processes by them."""


def admit(
    environment: Environment,
    command: str,
    *,
    cores: tuple[int, ...] = (),
    timeout_s: float | None = 120.0,
    variables: dict[str, str] | None = None,
    **more: Any,
) -> Execution:
    """Admit a command, by default bounded so that a broken protocol fails a test instead of hanging it."""
    given = {"holding": Holding(cores), "timeout_s": timeout_s, "variables": variables or {}, **more}
    return environment.start(ExecRequest(action_id="a1", command=command, **given))


def run(environment: Environment, command: str, **more: Any) -> ExecOutcome:
    return admit(environment, command, **more).wait()


def printed(environment: Environment, command: str, session: str = "main") -> str:
    """Return what a command prints, which must succeed."""
    outcome = run(environment, command, session=session)
    assert outcome.status == "succeeded", outcome
    assert outcome.exit_code == 0, outcome
    return outcome.stdout.decode()


def open_one(sandbox: ProcessSandbox, name: str = "e1") -> ProcessEnvironment:
    return sandbox.open(EnvironmentSpec(id=name))


@dataclass
class Followed:
    """A command that runs, what it has printed so far, and its outcome once it has ended."""

    execution: Execution
    seen: dict[str, bytes] = field(default_factory=lambda: {"stdout": b"", "stderr": b""})
    outcomes: list[ExecOutcome] = field(default_factory=list)
    thread: threading.Thread | None = None

    def take(self, name: str, data: bytes) -> None:
        self.seen[name] += data

    def prints(self, text: str, stream: str = "stdout") -> bool:
        """Wait until it has printed something; return whether it did in time."""
        return until(lambda: text.encode() in self.seen[stream])

    def outcome(self) -> ExecOutcome:
        assert self.thread is not None
        self.thread.join(150)
        (outcome,) = self.outcomes
        return outcome


@contextmanager
def followed(environment: Environment, command: str, *, timeout_s: float | None = 120.0, **more: Any) -> Iterator[Followed]:
    """Have a command run as long as the block lasts."""
    found: list[Followed] = []
    take: Callable[[str, bytes], None] = lambda name, data: found[0].take(name, data)  # noqa: E731
    request = ExecRequest(action_id="a", command=command, on_output=take, timeout_s=timeout_s, **more)
    one = Followed(environment.start(request))
    found.append(one)
    one.thread = threading.Thread(target=lambda: one.outcomes.append(one.execution.wait()))
    one.thread.start()
    try:
        yield one
    finally:
        one.execution.kill("end of test")
        one.thread.join(60)


@contextmanager
def running(
    env: Environment, command: str, holding: Holding, session: str = "main", **more: Any
) -> Iterator[tuple[Execution, list[ExecOutcome]]]:
    """Have a command run under a grant, by default without a timeout, as long as the block lasts."""
    with followed(env, command, **{"holding": holding, "session": session, "timeout_s": None, **more}) as one:
        yield one.execution, one.outcomes
    assert one.outcomes


def sleepers(number: str, count: int = 1) -> list[int]:
    """Return the processes `sleep number`, once there are so many."""
    marker = f"sleep\x00{number}\x00"
    assert until(lambda: len(processes_with(marker)) == count), processes_with(marker)
    return processes_with(marker)


MOST_READS = 10_000
"""A process whose command line is empty so often was started without one."""


def processes_with(marker: str) -> list[int]:
    """Return the ids of living processes whose command line holds `marker`, or their working folder if it is a path."""
    found, sought = [], os.fsencode(marker)
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            is_sought = sought in _command_line(name)
            if is_sought or ("/" in marker and marker in os.readlink(f"/proc/{name}/cwd")):
                process = tree.read_process(int(name))
                if process is not None and not process.is_dying:
                    found.append(process.pid)
        except OSError:
            continue
    return found


def _command_line(name: str) -> bytes:
    """Return the command line of a process. While execve(2) loads a program it is empty, and in the background that takes long.

    Raises OSError where the process runs no program: it has ended, or is the kernel's.
    """
    for _ in range(MOST_READS):
        with open(f"/proc/{name}/cmdline", "rb") as file:
            if line := file.read():
                return line
        os.readlink(f"/proc/{name}/exe")
        time.sleep(0.001)
    return b""


Asked = tuple[str, str, str]
"""An environment, a session of it, and a command."""


@dataclass
class Worker:
    """A worker to be killed: a fork of this process with a sandbox of its own."""

    process: ForkProcess
    hears: Connection

    def is_idle(self) -> bool:
        return self.end() is not None

    def end(self) -> str | None:
        """Wait until its commands are over; return the cause and the reason of the last one's end, None where it says something else."""
        word, _, end = self.hears.recv().partition(" ")
        return end if word == "over" else None

    def await_pause(self) -> None:
        assert self.hears.recv() == "paused"

    def kill(self) -> None:
        """Kill it, and wait until it has ended."""
        self.process.kill()
        self.process.join()


@contextmanager
def worker_to_be_killed(
    base: Path,
    *commands: Asked,
    background: bool = False,
    grant_mb: int = 0,
    memory_mb: int | None = None,
    side_by_side: Sequence[ExecRequest] = (),
    goes_on_with: Sequence[ExecRequest] = (),
    make: Callable[..., Sandbox] = ProcessSandbox,
    **options: Any,
) -> Iterator[Worker]:
    """Start a worker with a sandbox in `base`, made by `make`; yield it once the last command, maybe in the background, is about to run.

    Each has a grant of `grant_mb` of memory, 0 for none. The worker says when an environment is paused for want of more. In the
    environment of the last command, others run `side_by_side`, or are gone on with, which a worker before this one has left.
    """
    hears, tells = Pipe(duplex=False)

    def work() -> None:
        box = make(base, **options)
        box.watcher.on_wanted = lambda report: tells.send("paused")
        for number, (environment, session, command) in enumerate(commands, 1):
            last = number == len(commands)
            if last:
                tells.send("running")
            request = ExecRequest(action_id="a", command=command, session=session, holding=Holding(background=background and last))
            opened = box.open(EnvironmentSpec(id=environment, memory_mb=memory_mb))
            with opened.allowance.action(grant_mb, (1, number)) if opened.allowance is not None else nullcontext():
                execution = opened.start(request)
                ended = execution.wait()
            execution.note_told()
        threads = [threading.Thread(target=opened.start(request).wait) for request in (*side_by_side, *goes_on_with)]
        for thread in threads:
            thread.start()
        tells.send(f"over {ended.cause}: {ended.reason}")
        signal.pause()

    worker = Worker(get_context("fork").Process(target=work), hears)
    worker.process.start()
    tells.close()
    try:
        assert hears.recv() == "running"
        yield worker
    finally:
        worker.kill()
        hears.close()


def in_background(pid: int, means: Means) -> bool:
    """Say whether every thread of a process is held in the background by these means."""
    match means:
        case "cgroup":
            return any(map(is_low, cpu_groups(pid)))
        case "affinity":
            return all(os.sched_getaffinity(thread) == {max(os.sched_getaffinity(0))} for thread in tree.threads(pid))


def cpu_groups(pid: int) -> list[Path]:
    """Return the control groups of a process that divide cores. The hierarchy of version 2 has no name."""
    lines = [line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
    return [Path(f"/sys/fs/cgroup/{name}{path}") for _, name, path in lines if name == "" or "cpu" in name.split(",")]


def is_low(group: Path) -> bool:
    low = {weight.IDLE: 1} | {each.name: each.background for each in weight.WEIGHTS}
    return any(file.exists() and int(file.read_text()) == value for name, value in low.items() if (file := group / name))


def until(condition: Callable[[], bool], limit_s: float = 60.0) -> bool:
    """Look again and again until `condition` holds, ever more seldom, as looks at all processes cost; return whether it did in time."""
    return wait_until(condition, limit_s)


def groups_like(pattern: str) -> list[Path]:
    """Return control groups by name. Groups of others come and go meanwhile, which os.walk bears and a glob does not."""
    every = (Path(above, name) for above, below, _ in os.walk("/sys/fs/cgroup") for name in below)
    return [path for path in every if fnmatch(path.name, pattern)]
