"""A sandbox whose commands are arithmetic: what they print, how long they take, and a ledger of what was really run.

The command line is a JSON object: `work_s` seconds on one core, the fraction `parallel` of it in parallel, the `exit` code, and `print`. It
takes `memory_mb` while it runs, and leaves programs that hold `resident_mb`, and `later_mb` more after a second.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from scheduler.learning.durations import speed_on
from tangram import clock
from tangram.elasticity import Amdahl
from tests.virtual.memory import VirtualControls, VirtualWatcher
from workers.cpu.abstract import Environment, EnvironmentSpec, ExecOutcome, ExecRequest, Execution, Given, Holding, Sandbox, Usage
from workers.cpu.errors import DiskFull, EnvironmentGone, NoSuchFile
from workers.cpu.memory.allowance import Allowance
from workers.cpu.opening import Opening
from workers.cpu.ports.exchange import HttpAnswer, HttpRequest
from workers.cpu.ports.wait import Wait
from workers.cpu.weight import Means

BACKGROUND_SPEED = 0.25
"""The speed of a command in the background, on whatever others leave idle."""


@dataclass
class Run:
    """One run of a command, as it really happened."""

    action: str
    node: str
    began_at: float
    outcome: str = ""
    exit_code: int | None = None


@dataclass(frozen=True)
class Claim:
    """A try that a node has claimed."""

    action: str
    attempt: int
    node: str
    epoch: int


@dataclass(frozen=True)
class Crowd:
    """The memory that the environments of a worker were allowed at one moment, more than its node has."""

    worker: str
    memory_mb: int
    allowed: dict[str, int]


@dataclass
class Ledger:
    """All that was really claimed and run, and what is held now, by worker process."""

    claims: list[Claim] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    cores: dict[str, dict[str, tuple[int, ...]]] = field(default_factory=dict)
    crowds: list[Crowd] = field(default_factory=list)
    paused: int = 0
    """How often environments were paused for want of memory."""

    def begin(self, action: str, worker: str) -> Run:
        run = Run(action, worker, clock.monotonic())
        self.runs.append(run)
        return run

    def hold(self, worker: str, action: str, cores: tuple[int, ...]) -> None:
        self.cores.setdefault(worker, {})[action] = cores

    def shared(self) -> set[tuple[str, str, str]]:
        """Return the commands that hold a core together, two and two, with their worker."""
        return {
            (worker, one, other)
            for worker, held in self.cores.items()
            for one, cores in held.items()
            for other, theirs in held.items()
            if one < other and set(cores) & set(theirs)
        }

    def release(self, worker: str, action: str) -> None:
        self.cores.get(worker, {}).pop(action, None)


class VirtualExecution(Execution):
    """A command that takes its time."""

    def __init__(self, environment: VirtualEnvironment, request: ExecRequest) -> None:
        self._environment, self._request = environment, request
        self._work = json.loads(request.command or "{}")
        self._holding = request.holding
        self._changed = clock.event()
        self._killed = ""
        self._done_s = self._waited_s = self._ran_s = self._cpu_s = self._background_s = 0.0
        self._since = 0.0
        self.run: Run | None = None
        self._ended: ExecOutcome | None = None
        self.message = request.message
        self.is_told = False

    @property
    def action(self) -> str:
        return self._request.action_id

    @property
    def session(self) -> str:
        return self._request.session

    def left(self) -> bool:
        """Return whether the next worker is to go on with it: it has begun, and nobody may have been told of its end."""
        return self.run is not None and not self.is_told

    def resume(self, before: VirtualExecution) -> None:
        """Go on with what the worker before this one has left, a command or its end. What it did since counts as it was granted there."""
        self._ended = before._ended
        self._work, self.run, self._since, self.message = before._work, before.run, before._since, before.message
        self._done_s, self._waited_s, self._ran_s = before._done_s, before._waited_s, before._ran_s
        self._cpu_s, self._background_s = before._cpu_s, before._background_s

    def note_told(self) -> None:
        self.is_told = True

    @property
    def _speed(self) -> float:
        if self._environment.is_frozen:
            return 0.0
        if self._holding.background:
            return BACKGROUND_SPEED
        return speed_on(Amdahl(self._work.get("parallel", 0.0)), max(1, len(self._holding.cores) or self._request.dop))

    def wait(self) -> ExecOutcome:
        environment, request = self._environment, self._request
        given_up = lambda: bool(self._killed) or environment.gone  # noqa: E731
        with environment.session(request.session, given_up, goes_on=self.run is not None) as its_turn:
            if not its_turn:
                return self._outcome("cancelled", None, self._killed or "its environment is closed")
            memory_mb, run = self._work.get("memory_mb", 0), self.run
            if run is None:
                run = self.run = environment.ledger.begin(request.action_id, environment.worker)
                self._since = clock.monotonic()
                environment.take(memory_mb)
            environment.ledger.hold(environment.worker, request.action_id, self._holding.cores)
            try:
                outcome = self._ended = self._ended or self._run()
            finally:
                self._since = 0.0
                environment.leave(memory_mb, self._work.get("resident_mb"), self._work.get("later_mb", 0))
                environment.ledger.release(environment.worker, request.action_id)
            run.outcome, run.exit_code = outcome.status, outcome.exit_code
            return outcome

    def _run(self) -> ExecOutcome:
        limit_s = self._request.timeout_s or float("inf")
        while True:
            self._changed.clear()
            self._changed.wait(self._left_s(limit_s))
            self._settle()
            if self._environment.gone:
                return self._outcome("cancelled", None, "its environment is closed")
            if self._killed:
                return self._outcome("cancelled", None, self._killed)
            if self._work["work_s"] - self._done_s <= 1e-9:
                return self._outcome("succeeded", int(self._work.get("exit", 0)), "")
            if limit_s - self._ran_s <= 1e-9:
                return self._outcome("timed_out", None, f"it ran longer than {limit_s:g} s")

    def _left_s(self, limit_s: float) -> float | None:
        """Return for how long it runs on as it does now; None while it stands still."""
        if not self._speed:
            return None
        left_s = max(0.0, self._work["work_s"] - self._done_s) / self._speed
        return max(0.0, left_s if self._holding.background else min(left_s, limit_s - self._ran_s))

    def settle(self) -> None:
        """Count what it has done until now."""
        if self._since:
            self._settle()

    def _settle(self) -> None:
        now = clock.monotonic()
        passed_s, self._since = now - self._since, now
        self._done_s += passed_s * self._speed
        if self._environment.is_frozen:
            return
        if self._holding.background:
            self._background_s += passed_s * self._speed
            self._cpu_s += passed_s * self._speed
            self._waited_s += passed_s * (1 - self._speed)
        else:
            self._ran_s += passed_s
            self._cpu_s += passed_s * max(1, len(self._holding.cores))

    def _outcome(self, status: str, exit_code: int | None, reason: str) -> ExecOutcome:
        cause = {"timed_out": "timeout", "cancelled": "cancelled"}.get(status, "exit" if exit_code else "")
        return ExecOutcome(
            status=status,  # type: ignore[arg-type]
            exit_code=exit_code,
            stdout=str(self._work.get("print", "")).encode(),
            stderr=b"",
            truncated=False,
            reason=reason,
            execution_s=self._ran_s + self._background_s,
            cpu_s=self._cpu_s,
            max_rss_mb=1.0,
            background_s=self._waited_s,
            cause=cause,
        )

    def resize(self, holding: Holding) -> None:
        if self._since:
            self._settle()
            self._environment.ledger.hold(self._environment.worker, self._request.action_id, holding.cores)
        self._holding = holding
        self._changed.set()

    def used(self) -> Usage | None:
        return Usage(cpu_s=self._cpu_s, background_cpu_s=self._background_s) if self._since else None

    def give(self, given: Given) -> None:
        pass

    def kill(self, reason: str) -> None:
        self._killed = self._killed or reason
        self._environment.wake()
        self._changed.set()

    def stir(self) -> None:
        """Have it see whether its environment is gone."""
        self._changed.set()


class VirtualEnvironment(Environment):
    """Files in a dictionary, and commands that take turns in each session. It goes on with the memory that `left` an earlier worker."""

    def __init__(self, spec: EnvironmentSpec, sandbox: VirtualSandbox, left: VirtualControls | None = None) -> None:
        self._spec, self._sandbox = spec, sandbox
        self.worker, self.ledger = sandbox.worker, sandbox.ledger
        self.gone = self.is_frozen = self.is_left = False
        limit_mb = spec.memory_mb or 0
        self._controls = VirtualControls(limit_mb, self._freeze, left)
        self._allowance = Allowance(spec.id, limit_mb, self._controls, sandbox.watcher) if sandbox.memory_mb else None
        self._files: dict[str, bytes] = {}
        self._busy: set[str] = set()
        self._freed = clock.event()
        self._executions: list[VirtualExecution] = []
        self._left: dict[str, VirtualExecution] = {}

    @property
    def spec(self) -> EnvironmentSpec:
        return self._spec

    @property
    def allowance(self) -> Allowance | None:
        return self._allowance

    def take(self, memory_mb: int) -> None:
        """Have its programs want so much more memory."""
        self._controls.wanted_mb += memory_mb
        if self._allowance is not None:
            self._allowance.look()

    def leave(self, memory_mb: int, resident_mb: int | None, later_mb: int) -> None:
        """Have a command that took so much leave programs that hold `resident_mb`, if that is said, and `later_mb` more after a second."""
        if self.is_left:
            return
        self._controls.wanted_mb -= memory_mb
        if resident_mb is not None and len(self._busy) == 1:  # else it has others' memory, too
            self._controls.wanted_mb = resident_mb
        if later_mb:
            clock.thread(partial(self._grow_later, later_mb), "grows").start()

    def _grow_later(self, memory_mb: int) -> None:
        clock.sleep(1.0)
        if not self.gone:
            self.take(memory_mb)

    def _freeze(self, frozen: bool) -> None:
        if frozen == self.is_frozen:
            return
        for execution in self._executions:
            execution.settle()
        self.is_frozen = frozen
        self.ledger.paused += frozen
        for execution in self._executions:
            execution.stir()

    def start(self, request: ExecRequest) -> Execution:
        self._check()
        execution = VirtualExecution(self, request)
        if (before := self._left.pop(request.action_id, None)) is not None:
            execution.resume(before)
        self._executions.append(execution)
        return execution

    @contextmanager
    def session(self, name: str, given_up: Callable[[], bool], *, goes_on: bool) -> Iterator[bool]:
        """Wait for the turn of a command in a session, which it has where it `goes_on`. Say whether it has it, or was given up."""
        while not goes_on and not given_up() and name in self._busy:
            self._freed.clear()
            self._freed.wait()
        has = goes_on or not given_up()
        if has:
            self._busy.add(name)
        try:
            yield has
        finally:
            if has:
                self._busy.discard(name)
                self.wake()

    def leave_all(self) -> None:
        """Take note of the commands that the next worker is to go on with, as this one is killed."""
        self.is_left = True
        self._left |= {one.action: copy(one) for one in self._executions if one.left()}

    def printed_by(self, action_id: str) -> int | None:
        return 0 if action_id in self._left else None

    @property
    def left_messages(self) -> list[str]:
        """Return the messages of the commands that the worker before this one has left."""
        return [execution.message for execution in self._left.values()]

    def wake(self) -> None:
        """Have all that waits look again."""
        self._freed.set()

    @property
    def is_busy(self) -> bool:
        return bool(self._busy)

    def adopted(self, sandbox: VirtualSandbox) -> VirtualEnvironment:
        """Return it as the worker has it that goes on with it."""
        environment = VirtualEnvironment(self._spec, sandbox, self._controls)
        environment._files = self._files
        environment._left, environment._busy = self._left, {one.session for one in self._left.values()}
        return environment

    def close_session(self, name: str, *, idle_only: bool = False) -> None:
        self._check()

    def read_file(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        self._check()
        if path not in self._files:
            raise NoSuchFile(path)
        return self._files[path]

    def write_file(self, path: str, data: bytes, mode: int | None = None, offset: int = 0) -> None:
        self._check()
        self._files[path] = data

    def request(self, asked: HttpRequest, holding: Holding, wait: Wait) -> HttpAnswer:
        raise NotImplementedError("no server listens in a virtual environment")

    def close(self) -> None:
        if not self.gone:
            self.gone = True
            if self._allowance is not None:
                self._allowance.close()
            self.wake()
            for execution in self._executions:
                execution.stir()
            self._sandbox.forget(self._spec.id)

    def _check(self) -> None:
        if self.gone:
            raise EnvironmentGone(f"environment {self._spec.id} is closed")


class VirtualSandbox(Sandbox):
    """The environments of one worker process."""

    def __init__(
        self,
        worker: str,
        ledger: Ledger,
        opening_s: Callable[[], float],
        is_sick: Callable[[], bool],
        left: tuple[VirtualEnvironment, ...] = (),
        memory_mb: int = 0,
    ) -> None:
        """Begin with the environments that the worker before this one has `left`, and the commands in them.

        A node of `memory_mb` pauses environments at their allowance.
        """
        self.worker, self.ledger, self.memory_mb = worker, ledger, memory_mb
        self._opening_s, self._is_sick = opening_s, is_sick
        self.watcher = VirtualWatcher(self.note_allowed)  # type: ignore[assignment]
        self._environments: dict[str, VirtualEnvironment] = {}
        self._environments |= {one.spec.id: one.adopted(self) for one in left}
        self.left_messages = [message for one in self.environments() for message in one.left_messages]
        for environment in self.environments():
            if environment.allowance is not None:
                environment.allowance.adopt()

    @property
    def outlives_worker(self) -> bool:
        return True

    @property
    def background(self) -> Means:
        return "cgroup"

    def open(self, spec: EnvironmentSpec, opening: Opening | None = None) -> Environment:
        found = self._environments.get(spec.id)
        if found is not None:
            return found
        clock.sleep(self._opening_s())
        if opening is not None:
            opening.check()
        if self._is_sick():
            raise DiskFull("the disk of the node is full")
        if spec.id not in self._environments:
            self._environments[spec.id] = VirtualEnvironment(spec, self)
        return self._environments[spec.id]

    def get(self, environment_id: str) -> Environment:
        if environment_id not in self._environments:
            raise EnvironmentGone(f"there is no environment {environment_id}")
        return self._environments[environment_id]

    def forget(self, environment_id: str) -> None:
        self._environments.pop(environment_id, None)

    def note_allowed(self) -> None:
        """Put it into the ledger if environments may use more than there is. The caller holds the lock of one allowance."""
        allowances = [one.allowance for one in self.environments() if one.allowance is not None and one.allowance._is_granted]
        allowed = {allowance.environment: allowance.allowed_mb for allowance in allowances}
        if sum(allowed.values()) > self.memory_mb:
            self.ledger.crowds.append(Crowd(self.worker, self.memory_mb, allowed))

    def wanted(self) -> list[dict[str, Any]]:
        """Return the reports of all environments that are paused."""
        reports = (one.allowance.wanted() for one in self.environments() if one.allowance is not None)
        return [report for report in reports if report is not None]

    def environments(self) -> tuple[VirtualEnvironment, ...]:
        return tuple(self._environments.values())

    def close(self) -> None:
        for environment in self.environments():
            environment.close()
