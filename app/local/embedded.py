"""The embedded stack: Redis, SQLite, and the processes of a deployment, all in one state folder, for one person.

| in the state folder | what it is |
|---|---|
| `lock` | held by the process that runs the stack; its number is inside |
| `stack.json` | addresses for clients and tools (`tangram.settings`), and the processes for whoever cleans up after a crash |
| `metrics.json` | where the processes serve their metrics, for `file_sd_configs` of Prometheus; only where they do |
| `redis.sock` | the broker's and result store's socket |
| `redis/` | what the broker and result store hold; outlives the stack |
| `tangram.sqlite` | the journal; outlives the stack |
| `logs/` | a log per process; `.1` is the one of the run before |

Order of life: lock, leftovers of a crashed stack, Redis, migration, the processes; and backwards. Which processes
there are is the caller's affair, and so is whether one that dies ends the stack (`check`) or is started again (`supervise`).
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Literal, Self

import psutil
from pydantic import BaseModel, Field, ValidationError

from app.journal.database import sqlite_url
from app.journal.migrating import upgrade
from app.local.kept_environments import end_kept
from app.local.processes import (
    METRICS_HOST,
    METRICS_PORT,
    Command,
    Identity,
    Process,
    StackError,
    describe,
    stop_stranger,
    this_boot,
    wait_until,
)
from app.local.redis_server import RedisServer, remove_socket_folder

log = logging.getLogger(__name__)

LOG_LINES = 10
LOOK_S = 0.1
"""Time between two looks at the processes."""

FIRST_PAUSE_S = 0.2
MOST_RESTARTS, RESTARTS_S = 5, 60.0
"""A process that has been restarted this often within this time, and ends again, is given up."""
REFUSED = "exit code 2"
"""How a process of the system ends that was given something wrong, or cannot reach what it needs."""


class StackRunning(StackError):
    """Raised when another process runs a stack in this state folder."""


class StackFile(BaseModel):
    """What `stack.json` says: the addresses, the boot of the machine, and of each process its number and start (seconds since the epoch).

    `metrics` are the addresses at which processes serve their metrics, by name. `booted_at` is when the clock then said it was booted.
    """

    broker_url: str
    result_url: str
    database_url: str
    pids: dict[str, int]
    started_at: dict[str, float]
    booted_at: float = Field(default_factory=psutil.boot_time)
    boot: str = Field(default_factory=this_boot)
    socket_folder: Path | None = None
    metrics: dict[str, str] = {}


class Restarts:
    """When a process that has ended is started again: after a pause that doubles with each restart of the last `RESTARTS_S`."""

    def __init__(self) -> None:
        self._made: deque[float] = deque()
        self._due: float | None = None

    def decide(self, now: float, most: int = MOST_RESTARTS) -> Literal["wait", "restart", "give up"]:
        """Say what to do with a process that is found ended at `now`; "restart" is taken for done, at most `most` times."""
        while self._made and self._made[0] <= now - RESTARTS_S:
            self._made.popleft()
        if self._due is None:
            if len(self._made) >= most:
                return "give up"
            self._due = now + FIRST_PAUSE_S * 2 ** len(self._made)
        if now < self._due:
            return "wait"
        self._due = None
        self._made.append(now)
        return "restart"


class EmbeddedStack:
    """A stack that lives as long as its context.

    `commands` are started in order and stopped in reverse, each given `stop_timeout_s` to end by itself while Redis lives.
    Every process gets TANGRAM_BROKER_URL, TANGRAM_RESULT_URL, TANGRAM_DATABASE_URL and TANGRAM_STATE_DIR.
    """

    process_type: ClassVar[type[Process]] = Process
    """The class of its processes, but for Redis; a subclass may have another one."""

    def __init__(self, state_dir: Path, commands: Sequence[Command] = (), *, stop_timeout_s: float = 10.0) -> None:
        self.state_dir = state_dir.expanduser().absolute()
        self.stack_file = self.state_dir / "stack.json"
        self.metrics_file = self.state_dir / "metrics.json"
        self.database_url = sqlite_url(self.state_dir / "tangram.sqlite")
        self._commands = tuple(commands)
        self._stop_timeout_s = stop_timeout_s
        self._processes: dict[str, Process] = {}
        self.metrics: dict[str, str] = {}
        """Where processes serve their metrics, by name."""
        self._redis: RedisServer | None = None
        self._restarts = defaultdict[str, Restarts](Restarts)
        self._exit = ExitStack()

    def __enter__(self) -> Self:
        """Start everything.

        Raises `StackRunning` when a stack runs in this folder; `StackError` when the folder cannot be used or a part does not start;
        nothing is left running then; `DatabaseError` when the database cannot be made.
        """
        with ExitStack() as undo:
            self._exit = undo
            undo.callback(self._forget)
            undo.enter_context(_locked(self.state_dir))
            undo.callback(end_kept, self.state_dir)
            _clean_leftovers(self.stack_file, self._stop_timeout_s)
            self._redis = RedisServer(self.state_dir, log=self._log("redis"))
            self._processes["redis"] = self._redis.process
            undo.callback(self._redis.stop)
            undo.callback(self.stack_file.unlink, missing_ok=True)
            undo.callback(self.metrics_file.unlink, missing_ok=True)
            self._write_stack_file()
            upgrade(self.database_url)
            for command in self._commands:
                self.spawn(command)
            self._exit = undo.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop everything, in reverse order; those that work for the first one end beside each other."""
        try:
            for process in [*self._processes.values()][2:]:
                process.ask()
        finally:
            self._exit.close()

    @property
    def broker_url(self) -> str:
        """The Celery broker's URL, once the stack is up."""
        if self._redis is None:
            raise StackError("the embedded stack is not up")
        return self._redis.url

    @property
    def result_url(self) -> str:
        """The Celery result store's URL, once the stack is up."""
        return self.broker_url

    @property
    def environment(self) -> dict[str, str]:
        """The variables that point a process at this stack."""
        return {
            "TANGRAM_BROKER_URL": self.broker_url,
            "TANGRAM_RESULT_URL": self.result_url,
            "TANGRAM_DATABASE_URL": self.database_url,
            "TANGRAM_STATE_DIR": str(self.state_dir),
        }

    def spawn(self, command: Command) -> Process:
        """Start one more process of the stack. Raises `StackError` when it cannot be started, or the stack has one of that name."""
        if command.name in self._processes:
            raise StackError(f"the stack has a process {command.name} already")
        inherited = {name: value for name, value in os.environ.items() if name != METRICS_PORT}
        env = {**inherited, "PYTHONUNBUFFERED": "1", **self.environment}
        process = self.process_type(command, log=self._log(command.name), env=env)
        # One callback each: an interrupt while one process is stopped must not spare the others.
        self._exit.callback(self._stop, process)
        self._processes[command.name] = process
        if METRICS_PORT in command.env:
            self.metrics[command.name] = f"{METRICS_HOST}:{command.env[METRICS_PORT]}"
        self._write_stack_file()
        return process

    def _stop(self, process: Process) -> None:
        """Stop a process. Where Redis has ended, it is given no time, which it would spend on reports that reach nobody."""
        process.stop(0.0 if self._processes["redis"].ended() is not None else self._stop_timeout_s)

    def restart(self, name: str) -> None:
        """Start a process that has ended once more. Raises `StackError` when it cannot be started."""
        self._processes[name].restart()
        self._write_stack_file()

    def supervise(
        self, stop: threading.Event, say: Callable[[str], None], ready: Callable[[], bool] | None = None, timeout_s: float = math.inf
    ) -> None:
        """Restart every process that ends, Redis among them, until `stop` is set; `say` is given a line for each restart.

        With `ready` return as soon as it holds. What a process is given may be wrong while a stack starts: one that refuses it twice is
        given up at once.

        Raises `StackError` when a process ends once more after `MOST_RESTARTS` within `RESTARTS_S`, or cannot be started; the last lines of
        its log were said before. Raises it, too, when `ready` does not hold after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while not stop.wait(LOOK_S):
            for name, process in self._processes.items():
                if (ended := process.ended()) is None:
                    continue
                most = 1 if ready is not None and ended == REFUSED else MOST_RESTARTS
                decision = self._restarts[name].decide(time.monotonic(), most)
                if decision == "give up":
                    for line in process.log_tail(LOG_LINES):
                        say(f"{name}: {line}")
                    times = f"after {most} restart{'s' if most > 1 else ''} within {RESTARTS_S:g} s"
                    raise StackError(f"{name} ended with {ended} {times} and is given up: see {process.log}")
                if decision == "restart":
                    say(f"{name} ended with {ended} and is started again: see {process.log}")
                    self.restart(name)
            if ready is not None:
                if not self.dead() and ready():
                    return
                if time.monotonic() >= deadline:
                    raise self._not_ready(timeout_s)

    def dead(self) -> list[str]:
        """Return the names of the processes, Redis among them, that ended though nobody asked them to."""
        return [process.name for process in self._processes.values() if process.ended() is not None]

    def wait_ready(self, predicate: Callable[[], bool], timeout_s: float) -> None:
        """Wait until `predicate` holds.

        Raises `StackError` as soon as a process has ended, with the last lines of its log; or after `timeout_s`.
        """
        if not wait_until(lambda: bool(self.dead()) or predicate(), timeout_s):
            raise self._not_ready(timeout_s)
        self.check()

    def check(self) -> None:
        """Raise `StackError`, with the last lines of its log, when a process has ended though nobody asked it to."""
        for process in self._processes.values():
            if ended := process.ended():
                raise StackError("\n".join((f"{process.name} ended with {ended}, log {process.log}:", *process.log_tail(LOG_LINES))))

    def _not_ready(self, timeout_s: float) -> StackError:
        return StackError(f"the stack is not ready after {timeout_s:g} s: see {self.state_dir / 'logs'}")

    def _log(self, name: str) -> Path:
        return self.state_dir / "logs" / f"{name}.log"

    def _forget(self) -> None:
        self._redis = None
        self._processes.clear()
        self._restarts.clear()
        self.metrics.clear()

    def _write_stack_file(self) -> None:
        booted_at = psutil.boot_time()
        stack = StackFile(
            broker_url=self.broker_url,
            result_url=self.result_url,
            database_url=self.database_url,
            pids={process.name: process.identity.pid for process in self._processes.values()},
            started_at={process.name: booted_at + process.identity.started_s for process in self._processes.values()},
            booted_at=booted_at,
            socket_folder=self._redis.socket_folder if self._redis else None,
            metrics=self.metrics,
        )
        targets = [{"targets": [address], "labels": {"process_name": name}} for name, address in self.metrics.items()]
        with _state_folder_errors(self.state_dir):
            _write_private(self.stack_file, stack.model_dump_json(indent=2))
            if targets:
                _write_private(self.metrics_file, json.dumps(targets, indent=2))


@contextmanager
def _locked(state_dir: Path) -> Iterator[None]:
    """Hold the lock of the state folder, which is made where there is none."""
    with _state_folder_errors(state_dir):
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(state_dir / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with _state_folder_errors(state_dir):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pid = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
                raise StackRunning(
                    f"a stack runs in {state_dir} already (pid {pid or 'unknown'}): stop it or set TANGRAM_STATE_DIR"
                ) from None
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _clean_leftovers(stack_file: Path, wait_s: float) -> None:
    """Stop what a stack that crashed in this folder left running, newest first."""
    try:
        stack = StackFile.model_validate_json(stack_file.read_bytes())
    except FileNotFoundError:
        return
    except OSError as error:
        raise StackError(f"state folder {stack_file.parent}: {describe(error)}") from error
    except ValidationError:
        # Written in one piece, so it was not ours; there is nobody in it to be stopped.
        log.warning("%s is not a stack file and will be replaced", stack_file)
        return
    for name, pid in reversed(stack.pids.items()):
        if stop_stranger(Identity(pid, stack.started_at.get(name, 0.0) - stack.booted_at, stack.boot), wait_s):
            log.warning("stopped %s (pid %d), left running by a stack that crashed", name, pid)
    if stack.socket_folder is not None:
        remove_socket_folder(stack.socket_folder)
    stack_file.unlink(missing_ok=True)


@contextmanager
def _state_folder_errors(state_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StackError(f"state folder {state_dir}: {describe(error)}") from error


def _write_private(path: Path, text: str) -> None:
    """Replace the file `path` in one step; only its owner can read it."""
    draft = path.with_name(path.name + ".tmp")
    draft.unlink(missing_ok=True)
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as output:
        output.write(text)
        output.flush()
        os.fsync(output.fileno())
    draft.replace(path)
