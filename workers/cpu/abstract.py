"""What an environment and a sandbox are, whatever they are made of.

Only the abstract classes and the values that cross them live here; no process, no container, no thread.

| thing       | states                                | ends when                                        |
|-------------|---------------------------------------|--------------------------------------------------|
| environment | open, closed                          | `close()`, or its sandbox closes                 |
| session     | unstarted, idle, busy, dead           | its environment closes; a dead one starts again  |
| execution   | waiting, running, ending, over        | `wait()` has returned                            |

Threading: one thread calls `Execution.wait`, which does the work; `resize`, `used` and `kill` may come from any other.
Commands of one session run one after the other; commands of two sessions run side by side.
"""

from __future__ import annotations

import re
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from tangram.arguments import folder_path, program_words
from tangram.errors import InvalidAction
from workers.cpu.errors import EnvironmentGone, SnapshotUnsupported
from workers.cpu.memory.allowance import Allowance
from workers.cpu.memory.watcher import Watcher
from workers.cpu.opening import Opening
from workers.cpu.ports.exchange import HttpAnswer, HttpRequest
from workers.cpu.ports.wait import Wait
from workers.cpu.weight import Means

Status = Literal["succeeded", "timed_out", "cancelled", "failed", "lost"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
SHELL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _check_name(field_name: str, value: str) -> None:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise InvalidAction(field_name, f"must be 1 to 128 letters, digits, '.', '_' or '-', the first a letter or digit, not {value!r}")


def _check_positive(field_name: str, value: float | None) -> None:
    if value is not None and not 0 < value < float("inf"):
        raise InvalidAction(field_name, f"must be above 0, not {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSpec:
    """What an environment is asked to be. The `id` is also the name of its folder."""

    id: str
    image: str | None = None
    memory_mb: int | None = None

    def __post_init__(self) -> None:
        """Refuse ids that are no safe file name, and memory below 1."""
        _check_name("environment", self.id)
        _check_positive("memory_mb", self.memory_mb)


@dataclass(frozen=True, slots=True)
class Holding:
    """What a command may use: the ids of cores, or the background.

    In the background it has no cores of its own, and uses what the commands in the foreground leave idle, on any core.
    Otherwise no cores at all leaves open which, and how many, are used.
    """

    cores: tuple[int, ...] = ()
    background: bool = False

    def __post_init__(self) -> None:
        """Refuse ids below 0, and cores of its own for the background."""
        if self.background and self.cores:
            raise InvalidAction("cores", f"must be none in the background, not {self.cores!r}")
        for core in self.cores:
            if isinstance(core, bool) or not isinstance(core, int) or core < 0:
                raise InvalidAction("cores", f"ids must be whole and at least 0, not {core!r}")


@dataclass(frozen=True, slots=True)
class Data:
    """Bytes for the standard input of a command, or typed at its terminal."""

    data: bytes


@dataclass(frozen=True, slots=True)
class EndOfInput:
    """The standard input of a command ends; at a terminal, the character that says so is typed (Ctrl-D)."""


@dataclass(frozen=True, slots=True)
class Signal:
    """A signal for a command."""

    number: int

    def __post_init__(self) -> None:
        """Refuse what is no signal."""
        if self.number not in signal.valid_signals():
            raise InvalidAction("signal", f"must be the number of a signal, not {self.number!r}")


@dataclass(frozen=True, slots=True)
class WindowSize:
    """The size of a terminal, in characters."""

    rows: int
    columns: int

    def __post_init__(self) -> None:
        """Refuse sizes that no terminal has."""
        for name in ("rows", "columns"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 0xFFFF:
                raise InvalidAction(name, f"must be from 1 to {0xFFFF}, not {value!r}")


Given = Data | EndOfInput | Signal | WindowSize
"""What a running command can be given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecRequest:
    """One command for one session of an environment.

    Without cores in `holding`, the program gets the DoP `dop`. With `fence`, everything that earlier commands left running in the
    environment is ended first. The command then starts from a clean shell, without their variables and functions, in the same folder.
    Commands that other sessions are running go on.
    `timeout_s` is how long it may run, `output_timeout_s` how long it may print nothing; what it waits in the background
    counts for neither. Of the time for which it `is_held`, up to another `timeout_s` does not count.
    `output_limit_bytes` holds for each stream: of more, the last `output_tail_fraction` of it is kept, and the rest from the beginning.
    `variables` are environment variables of this command alone. It begins in the folder `cwd`, else where the session is. With an
    `interpreter`, `command` is the last argument of a program of its own; else the session's shell evaluates it. With `merged`, standard
    error goes where standard output goes. `on_output` is called with what the command prints, as it comes, by
    stream (`stdout` or `stderr`), in the thread that waits for it; it must be quick.
    While `is_held` says so, nothing is read from the command, which blocks once its pipes are full; that is no silence.
    With `stdin` it reads what `Execution.give` brings, else nothing. With `terminal`, a terminal of this size takes the place of its
    three streams. All its output is `stdout` then, and what it has started ends with it.
    `message` is what the next worker needs to go on with it where this one dies, as text; without one the command ends then.
    """

    action_id: str
    command: str
    holding: Holding = field(default_factory=Holding)
    dop: int = 1
    session: str = "main"
    cwd: str | None = None
    interpreter: Sequence[str] | None = None
    merged: bool = False
    fence: bool = False
    timeout_s: float | None = None
    output_timeout_s: float | None = None
    output_limit_bytes: int = 1_048_576
    output_tail_fraction: float = 0.5
    variables: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    on_output: Callable[[str, bytes], None] | None = None
    is_held: Callable[[], bool] | None = None
    stdin: bool = False
    terminal: WindowSize | None = None
    message: str = ""

    def __post_init__(self) -> None:
        """Refuse what no shell can be given."""
        _check_name("session", self.session)
        _check_positive("dop", self.dop)
        _check_positive("timeout_s", self.timeout_s)
        _check_positive("output_timeout_s", self.output_timeout_s)
        if "\0" in self.command:
            raise InvalidAction("command", "must not contain NUL characters")
        if self.output_limit_bytes < 0:
            raise InvalidAction("output_limit_bytes", f"must be at least 0, not {self.output_limit_bytes}")
        for name, value in self.variables.items():
            if self.interpreter is None and not SHELL_NAME.fullmatch(name):
                raise InvalidAction("variables", f"{name!r} is no name for a shell; programs with an `interpreter` can have it")
            if not name or "=" in name or "\0" in name + value:
                raise InvalidAction("variables", f"{name!r} must have a name without =, and no NUL characters")
        folder_path("cwd", self.cwd)
        if self.interpreter is not None:
            program_words(self.interpreter, self.command)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecOutcome:
    """How a command ended; `lost` where its environment has ended by itself.

    `exit_code` is there for `succeeded` only (128 + n for a shell ended by signal n); the output is what was printed
    so far in any case. `execution_s` runs from handing the command over to the end of its processes, less `background_s`: the seconds in
    which it wanted a core in the background and had none. It slept in the background by its own will for `slept_s`, a part of
    `execution_s`. `cpu_s` are the core-seconds of its process tree;
    `max_rss_mb` is the largest resident memory of the tree that was seen. `cause` says why it ended so, where it did not end well
    (`tangram/ends.py`).
    """

    status: Status
    exit_code: int | None
    stdout: bytes
    stderr: bytes
    truncated: bool
    reason: str
    execution_s: float
    cpu_s: float
    max_rss_mb: float
    background_s: float = 0.0
    slept_s: float = 0.0
    cause: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The core-seconds that a command's process tree has used since its start, and how many of them it got in the background."""

    cpu_s: float
    background_cpu_s: float = 0.0


class Execution(ABC):
    """One command, admitted to an environment. It begins when `wait` is called and its session is free."""

    @abstractmethod
    def wait(self) -> ExecOutcome:
        """Carry the command out in the calling thread and return how it ended.

        After a timeout or a kill it returns once the command's processes are gone. A second call returns the same outcome. Raises
        `NoSuchFolder`, `FolderUnusable`, `NoSuchProgram` or `ProgramUnusable` when the command cannot begin, as their names say.
        """

    @abstractmethod
    def resize(self, holding: Holding) -> None:
        """Hold all of the command's processes to `holding` from now on; nothing happens once it is over."""

    @abstractmethod
    def used(self) -> Usage | None:
        """Return what the command had used as of the last sample; None before the first."""

    @abstractmethod
    def give(self, given: Given) -> None:
        """Give the command input, a signal or another size of its terminal, in the order of the calls.

        What comes before it runs is kept until then. What comes once it is over, or needs an input or a terminal that it does not have,
        is dropped.
        """

    def note_told(self) -> None:
        """Take note that its end has been told, so that the next worker need not tell it."""
        return

    @abstractmethod
    def kill(self, reason: str) -> None:
        """Ask that the command end as `cancelled` for `reason`; the first reason counts, and none once it is over."""


class Environment(ABC):
    """A stateful sandbox: files, processes, shell sessions, held between actions."""

    @property
    @abstractmethod
    def spec(self) -> EnvironmentSpec:
        """Return what the environment was opened with."""

    @property
    def allowance(self) -> Allowance | None:
        """Return its memory, where it can be paused for want of it; else None."""
        return None

    @abstractmethod
    def start(self, request: ExecRequest) -> Execution:
        """Admit a command. Raises `EnvironmentGone` once closed."""

    def printed_by(self, action_id: str) -> int | None:
        """Return how many bytes a command has printed that the worker before this one has left; None where it has left none.

        It is gone on with by a `start` with the same limits. Its text is not needed.
        """
        return None

    @abstractmethod
    def close_session(self, name: str, *, idle_only: bool = False) -> None:
        """End every process of a session and forget its state; a command that still runs there ends as `cancelled`.

        Nothing happens where there is no such session, or where it is to be `idle_only` and a program runs in it. The next command of
        the name begins a fresh one. Raises `ProcessesLeft` when some did not end in time; they are ended with the environment. Raises
        `EnvironmentGone` when the environment was closed.
        """

    @abstractmethod
    def read_file(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Return a file's bytes, or at most `length` of them from `offset` on; a relative `path` starts at the work folder.

        Raises `NoSuchFile`, `PathIsDirectory`, `FileTooLarge` or `FileUnusable` as their names say; `EnvironmentGone` when the environment
        was closed.
        """

    @abstractmethod
    def write_file(self, path: str, data: bytes, mode: int | None = None, offset: int = 0) -> None:
        """Write a file, with the folders above it; `mode` sets its permissions, else a file that exists keeps its own.

        The file keeps its first `offset` bytes, which it must have, and ends with `data`. Raises `PathIsDirectory`, `FileTooLarge` or
        `FileUnusable` as their names say; `EnvironmentGone` when the environment was closed.
        """

    @abstractmethod
    def request(self, asked: HttpRequest, holding: Holding, wait: Wait) -> HttpAnswer:
        """Have a server that runs here answer a request. What commands left running uses `holding` meanwhile.

        Of several sessions with a loopback each, the first one counts in which something listens on the port.

        Raises `RequestUnusable`, `NothingListens` or `NoAnswer`, as their names say; `EnvironmentGone` when the environment was closed, or
        is lost; `ActionTimedOut` or `ActionCancelled` as `wait` says, `ActionCancelled` also where it is closed meanwhile.
        """

    @abstractmethod
    def close(self) -> None:
        """End every process and remove every file of it. Running commands end as `cancelled`. Again: nothing."""


LOSSES_KEPT = 100


@dataclass(frozen=True, slots=True)
class Loss:
    """An environment has ended by itself: why, in a line for a person and as a cause (`tangram/ends.py`)."""

    environment: str
    reason: str
    cause: str = "environment_lost"


class Losses(dict[str, Loss]):
    """The latest losses, by environment."""

    def note(self, loss: Loss) -> None:
        """Add one, in the place of the oldest where there are too many."""
        self[loss.environment] = loss
        if len(self) > LOSSES_KEPT:
            del self[next(iter(self))]


class Sandbox(ABC):
    """Where environments of one kind live.

    `watcher` waits for environments that want more memory. `memory_problem` says why environments cannot be paused for want of memory; it
    is empty where a trial has shown that they can.
    """

    watcher: Watcher
    memory_problem: str
    left_messages: Sequence[str] = ()
    """The messages of the commands that the worker before this one has left, each to be gone on with by a `start` in its environment."""

    @property
    @abstractmethod
    def background(self) -> Means:
        """Return by what means commands are held in the background here."""

    @property
    def enforces_memory(self) -> bool:
        """Return whether the processes of an environment cannot use more than its `memory_mb`."""
        return True

    @property
    def outlives_worker(self) -> bool:
        """Return whether open environments wait for the next worker where the process of this one ends without `close`."""
        return False

    def is_kept(self) -> bool:
        """Return whether they would wait if this process ended now. What keeps containers is started again where it was killed."""
        return self.outlives_worker

    @abstractmethod
    def open(self, spec: EnvironmentSpec, opening: Opening | None = None) -> Environment:
        """Return the environment of `spec`, opened unless it is already.

        Where `opening` ends first, its error is raised and nothing is left of the environment. Raises `EnvironmentExists` when one of this
        id is open with another specification.
        """

    @abstractmethod
    def get(self, environment_id: str) -> Environment:
        """Return an open environment. Raises `EnvironmentGone` when there is none of this id."""

    def snapshot(self, environment_id: str) -> str:
        """Keep the files of an environment as they are now, and return the image from which others can be opened here.

        Raises `EnvironmentGone` when it is not open here; `SnapshotUnsupported` when environments of this kind have no snapshots.
        """
        raise SnapshotUnsupported("only containers have snapshots")

    def losses(self) -> tuple[Loss, ...]:
        """Return the latest environments that have ended by themselves or were not adopted, but for those whose id was opened again."""
        return ()

    def close_environment(self, environment_id: str) -> None:
        """Close an environment if there is one of this id. Raises as `Environment.close` does."""
        try:
            environment = self.get(environment_id)
        except EnvironmentGone:
            return
        environment.close()

    @abstractmethod
    def environments(self) -> tuple[Environment, ...]:
        """Return the open environments, in the order of their opening."""

    @abstractmethod
    def close(self) -> None:
        """Close every environment; nothing can be opened afterwards."""
