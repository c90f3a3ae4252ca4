"""The process sandbox: environments without containers, root, or a server.

Every environment has a folder, a home and temporary files of its own. Its shells begin with a bare environment: no variable of the
worker gets in. A process tree can be held to cores and ended as a whole, wherever its processes hide. Setuid programs gain nothing.
`ProcessLimits` says what is limited.

| isolation    | what a session sees                                                                                      |
|--------------|----------------------------------------------------------------------------------------------------------|
| `bubblewrap` | of the host its system folders and the programs on PATH, read-only; no other environment, process, socket |
|              | or home; no network but a loopback of its own; no capability; at most 512 processes                      |
| `view`       | the same, without a promise: made by a part of this project that few have looked at                      |
| `none`       | all that the worker's user sees: files, the memory and variables of the worker's processes, the network  |

It does not protect from the following:

* The kernel is the host's: a hole in it is a way out.
* Disk is not limited.
* Memory is not limited where the worker may make no control groups. Where it may, all environments together have less than the node.
* Processes are not limited with `none`, nor for a worker that is root and may not choose users; see `users.py`. A fork bomb then
  reaches the whole machine.
* Core affinity is a convention, which a program can undo for itself.

Run malicious code in containers, or on a machine that holds nothing else.

A command in the background gets only time that no command in the foreground wants. So does what commands have left running between two
actions. How far that holds depends on what the worker may do here, see `background.py`.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import threading
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Literal

from workers.cpu.abstract import EnvironmentSpec, ExecRequest, Loss, Losses, Sandbox
from workers.cpu.base import close_all, take_base
from workers.cpu.cores import CoreMap
from workers.cpu.disk_floor import DiskFloor
from workers.cpu.errors import EnvironmentExists, EnvironmentGone, ImageUnsupported, SandboxError, SessionUnavailable
from workers.cpu.files import HostFiles, RegularFiles, RootedFiles
from workers.cpu.handover.adoption import Adoption
from workers.cpu.handover.fork_client import ForkClient
from workers.cpu.handover.protocol import End
from workers.cpu.leftovers import Leftovers
from workers.cpu.memory.allowance import Allowance
from workers.cpu.memory.pause_trial import BY_LIMIT, NO_GROUPS, Memory, problem_of
from workers.cpu.memory.watcher import Watcher
from workers.cpu.opening import Opening
from workers.cpu.process import seccomp
from workers.cpu.process.anchor import Anchor
from workers.cpu.process.backend import ProcessBackends, ShellSetup
from workers.cpu.process.background import background_of
from workers.cpu.process.environment import ProcessEnvironment
from workers.cpu.process.groups import Groups, MemoryGroup, find_groups
from workers.cpu.process.isolation import (
    CONTROL,
    HOME,
    PLACES,
    PROCESSES,
    STATES,
    USER,
    Folders,
    Isolation,
    IsolationChoice,
    View,
    counts_by_namespace,
    find_bubblewrap,
    view_for,
)
from workers.cpu.process.limits import ProcessLimits
from workers.cpu.process.programs import path_of_commands
from workers.cpu.process.users import Users, find_users
from workers.cpu.root import as_user, without_capabilities
from workers.cpu.shell.dialect import Dialect
from workers.cpu.shell.output import Drain
from workers.cpu.shell.record import Record
from workers.cpu.shell.session_setup import SessionSetup
from workers.cpu.weight import Means
from workers.memory import for_environments_mb

log = logging.getLogger(__name__)

DEFAULT_MAX_FILE_BYTES = 64 << 20
TRIAL_LIMIT_S = 10.0


class ProcessSandbox(Sandbox):
    """Environments below the folder `base`, which belongs to one living sandbox at a time.

    Raises `SandboxInUse` where another living sandbox has `base`; `SessionUnavailable` where there is no such shell, or an isolation or
    background that is asked for does not work here.

    Args:
        base: holds everything. What a sandbox that was closed has left in it is removed; see `handover/adoption.py` for one that was not.
        shell: the shell program; by default bash, where there is none, sh.
        search_path: PATH of the commands; by default the worker's own.
        limits: resource limits of every process.
        start_timeout_s: how long a shell may take to come up.
        core_map: the cores that environments may use; by default those of this process.
        max_file_bytes: the most that `read_file` and `write_file` pass in one piece.
        memory_mb: the most that an environment has where it names none, MiB; by default half of what all may have together.
        memory: `elastic` pauses environments at their allowance where a trial of it works.
        disk_floor_mb: no environment is opened while less disk is free, MiB.
        isolation: how shells are set apart from the host. `auto` is `bubblewrap` where a trial of it works, else `view`, else `none`.
        background: by what means processes are held in the background. `auto` is the best that works here.
        keep_s: for how long environments wait for another sandbox in `base` when this process dies, seconds.

    """

    def __init__(
        self,
        base: Path,
        *,
        shell: str | None = None,
        search_path: str | None = None,
        limits: ProcessLimits | None = None,
        start_timeout_s: float = 60.0,
        max_file_bytes: int = DEFAULT_MAX_FILE_BYTES,
        core_map: CoreMap | None = None,
        disk_floor_mb: int = 0,
        memory_mb: int | None = None,
        memory: Memory = "fixed",
        isolation: IsolationChoice = "auto",
        background: Means | Literal["auto"] = "auto",
        keep_s: float = 0.0,
    ) -> None:
        self._dialect = Dialect.find(shell)
        self._search_path = search_path or path_of_commands()
        self._limits = limits or ProcessLimits()
        self._limits_asked = asdict(self._limits)
        self._start_timeout_s, self._max_file_bytes = start_timeout_s, max_file_bytes
        self._base = Path(os.path.realpath(base))
        self._losses = Losses()
        self._base_lock, self._cleanup_lock, kept = take_base(self._base, ("environments", "etc"), keep_s, self._losses.note)
        self._core_map = core_map or CoreMap.of_this_process()
        self._disk_floor, self._leftovers = DiskFloor(disk_floor_mb, [self._base]), Leftovers()
        self._groups = find_groups(self._base)
        self._groups.remove()
        self.memory_mb = for_environments_mb()
        self.default_memory_mb = memory_mb or self.memory_mb // 2
        self._groups.bound_all(self.memory_mb)
        self.watcher = Watcher()
        self.memory_problem = self._try_memory() if memory == "elastic" else BY_LIMIT
        if self.memory_problem:
            self._groups = replace(self._groups, freezer=None)
        freezer = self._groups.freezer
        self._fork_client = ForkClient(self._cleanup_lock, self._base, keep_s, kept, self._drop_records, freezer)
        self._keep_s = keep_s
        self._drain, self._lock = Drain(), threading.Lock()
        self._environments: dict[str, ProcessEnvironment] = {}
        self._closed = False
        if background not in ("auto", "affinity", self.background):
            self.close()
            raise SessionUnavailable(f"processes cannot be held in the background by {background} here")
        if background == "affinity":
            self._groups = replace(self._groups, cpu=None)
        self._view: View | None = None
        self._users: Users | None = None
        self.isolation_reason = "as it was asked for"
        if isolation != "none":
            self._set_apart(isolation)
        self.left_messages: list[str] = []
        if kept is not None:
            # What was not to be paused has no freezer.
            ways = [self._made(freezer) for freezer in (self._groups.freezer, None)]
            given = (self._base / "environments", kept, ways, self._drain, self._fork_client, self._losses.note)
            adoption = Adoption[ProcessEnvironment](*given)
            self.left_messages = adoption.messages
            for environment in adoption.adopt(self._adopted):
                self._environments[environment.spec.id] = environment
                if environment.allowance is not None:
                    environment.allowance.adopt()

    @property
    def background(self) -> Means:
        return "affinity" if self._groups.cpu is None else "cgroup"

    @property
    def isolation(self) -> Isolation:
        """Return how shells are set apart; `isolation_reason` says why so."""
        return self._view.kind if self._view is not None else "none"

    @property
    def enforces_memory(self) -> bool:
        return self._groups.memory is not None

    @property
    def outlives_worker(self) -> bool:
        return self._keep_s > 0

    def _try_memory(self) -> str:
        """Try whether environments can be paused, in a group beside theirs; return why not, or nothing."""
        groups = self._groups
        if groups.memory is None:
            return NO_GROUPS
        freezer = None if groups.freezer is None else f"{groups.freezer}-trial"
        return problem_of(f"{groups.memory}/trial", freezer, is_v2=groups.is_v2)

    def _set_apart(self, isolation: IsolationChoice) -> None:
        """Use bubblewrap where it works, else, unless it was asked for, namespaces of the sandbox's own; and users, where these work."""
        view = view_for(self._base, self._search_path, self._dialect.program)
        problems: list[str] = []
        for kind in ("bubblewrap", "view") if isolation == "auto" else (isolation,):
            found, self._users = find_bubblewrap(view) if kind == "bubblewrap" else view, find_users()
            problem = with_users = self._problem_of(found)
            if problem and self._users is not None:
                self._users = None
                problem = self._problem_of(found)
            if not problem:
                self._view = found
                of_one = [f"environments are of one user, since {with_users}"] if with_users else []
                self.isolation_reason = "; ".join([*problems, *of_one, "a trial of it worked"])
                return
            problems.append(f"{kind} does not work here: {problem}")
        self.isolation_reason = "; ".join(problems)
        if isolation != "auto":
            self.close()
            raise SessionUnavailable(self.isolation_reason)

    def _problem_of(self, view: View | None) -> str:
        """Return what keeps environments from being set apart so, or nothing."""
        machine = os.uname().machine
        if seccomp.filter_for(machine) is None:
            return f"there is no filter of system calls for {machine}"
        return "there is no program bwrap" if view is None else self._try(view)

    def _try(self, view: View) -> str:
        """Run a command in an environment that is set apart; return why that failed, or nothing."""
        try:
            # One of another name may have been left by the worker before this one.
            environment = self._environment(EnvironmentSpec(id=f"trial-{secrets.token_hex(8)}"), Dialect.of("/bin/sh"), view)
        except (SandboxError, OSError) as error:
            return str(error)
        try:
            environment.write_file("/tmp/trial", b"")
            outcome = environment.start(ExecRequest(action_id="trial", command="test -f /tmp/trial", timeout_s=TRIAL_LIMIT_S)).wait()
        except SandboxError as error:
            return str(error)
        finally:
            environment.close()
        return outcome.reason or ("" if outcome.exit_code == 0 else f"a trial ended with code {outcome.exit_code}")

    def open(self, spec: EnvironmentSpec, opening: Opening | None = None) -> ProcessEnvironment:
        """See the base class. Raises `ImageUnsupported` for an image; `DiskFull` when the disk is too full for one more."""
        if spec.image is not None:
            raise ImageUnsupported(f"the process sandbox has no images, so it cannot open {spec.image!r}")
        opening = opening or Opening()
        while True:
            opening.check()
            with self._lock:
                if self._closed:
                    raise EnvironmentGone("the sandbox is closed")
                known = self._environments.get(spec.id)
                if known is None:
                    known = self._environments[spec.id] = self._make(spec)
                    self._losses.pop(spec.id, None)
            if not known.is_closed:
                break
            # One of that name is on its way out; its room is waited for.
            opening.phase = "waiting for an earlier environment of its id to close"
            known.close()
        if known.spec != spec:
            raise EnvironmentExists(f"environment {spec.id} is open with another specification")
        return known

    def losses(self) -> tuple[Loss, ...]:
        with self._lock:
            return tuple(self._losses.values())

    def _make(self, spec: EnvironmentSpec) -> ProcessEnvironment:
        self._disk_floor.check()
        return self._environment(spec, self._dialect, self._view)

    def _environment(self, spec: EnvironmentSpec, dialect: Dialect, view: View | None) -> ProcessEnvironment:
        folders = Folders(f"{self._base}/environments/{spec.id}")
        user = self._users.take() if view is not None and self._users is not None else None
        own = {"user": user, "memory_mb": spec.memory_mb or self.default_memory_mb}
        record = Record(folders.record, spec, self._made(self._groups.freezer), own)
        try:
            folders.make(PLACES if view is not None else (), user)
            record.write()
            return self._built(record, folders, dialect, view)
        except (OSError, SandboxError):
            # Else no environment of its id could be opened any more.
            shutil.rmtree(folders.root, ignore_errors=True)
            raise

    def _made(self, freezer: str | None) -> dict[str, object]:
        """Return how this sandbox sets environments up, as JSON has it."""
        limits, groups = self._limits_asked, [self._groups.cpu, self._groups.memory, freezer]
        shell = [self._dialect.program, self._search_path]
        return {"isolation": self.isolation, "shell": shell, "limits": limits, "groups": groups, "has_users": self._users is not None}

    def _adopted(self, record: Record, folders: Folders, ends: Sequence[End]) -> ProcessEnvironment:
        """Return an environment of the worker before this one, without its sessions."""
        if (user := record.own["user"]) is not None and self._users is not None:
            self._users.adopt(user)
        environment = self._built(record, folders, self._dialect, self._view, adopts=True)
        for end in ends:
            if not isinstance(end.channel, int) and not end.control and environment.anchor is not None:
                environment.anchor.adopt(end.channel, end.pid)
        return environment

    def _drop_records(self) -> None:
        """Have no successor go on with the environments that stand: the fork server that kept them was killed."""
        for environment in self.environments():
            environment.drop_record()

    def _built(self, record: Record, folders: Folders, dialect: Dialect, view: View | None, *, adopts: bool = False) -> ProcessEnvironment:
        """Return the environment of a record, whose folders are there. Raises `SandboxError`."""
        spec, user = record.spec, record.own["user"]
        groups, memory = self._bounded(record, adopts=adopts)
        controls = memory.controls() if memory is not None and not self.memory_problem else None
        limits = self._limits
        if view is not None and (user is not None or counts_by_namespace()):
            limits = replace(limits, processes=limits.processes or PROCESSES)
        files: RegularFiles
        if view is None:
            anchor, files = None, HostFiles(self._max_file_bytes, folders.work)
            home, control, states = folders.work, folders.control, folders.states
        else:
            asked = {**view.anchor(folders, user), "of": spec.id}
            anchor = Anchor(self._fork_client, asked, groups, limits.as_rlimits())
            as_inside = without_capabilities if user is None else partial(as_user, user, user)
            files = RootedFiles(self._max_file_bytes, HOME, anchor.root, as_inside)
            home, control, states = HOME, CONTROL, STATES
        shells = ShellSetup(
            environment=spec.id,
            dialect=dialect,
            home=home,
            variables=self._shell_variables(folders, dialect, is_set_apart=anchor is not None),
            limits=limits.as_rlimits(),
            background=background_of(self._core_map.available, groups),
            groups=groups,
            memory=memory,
            allowance=Allowance(spec.id, record.own["memory_mb"], controls, self.watcher) if controls is not None else None,
            anchor=anchor,
        )
        setup = SessionSetup(
            backends=ProcessBackends(self._fork_client, shells, self._core_map),
            drain=self._drain,
            dialect=dialect,
            control_folder=folders.control,
            control_inside=control,
            home=home,
            start_timeout_s=self._start_timeout_s,
            state_folder=folders.states,
            state_inside=states,
            record=record,
        )
        return ProcessEnvironment(spec, files, setup, self._forget, folders, anchor, memory, self._leftovers)

    def _bounded(self, record: Record, *, adopts: bool) -> tuple[Groups, MemoryGroup | None]:
        """Return where the groups of an environment's sessions are, and its own, which bounds its memory. Raises `SandboxError`."""
        try:
            groups = replace(self._groups, freezer=record.made["groups"][2])
            return groups.of_environment(record.spec.id, record.own["memory_mb"], adopts=adopts)
        except OSError as error:
            raise SandboxError(f"the memory of environment {record.spec.id} cannot be bounded: {error}") from error

    def _shell_variables(self, folders: Folders, dialect: Dialect, *, is_set_apart: bool) -> dict[str, str]:
        own = {"HOME": folders.work, "TMPDIR": folders.temporary}
        if is_set_apart:
            own = {"HOME": HOME, "TMPDIR": "/tmp", "USER": USER, "LOGNAME": USER}
        return {"PATH": self._search_path, **own, "LANG": "C.UTF-8", "TERM": "dumb", "SHELL": dialect.program}

    def get(self, environment_id: str) -> ProcessEnvironment:
        with self._lock:
            known = self._environments.get(environment_id)
        if known is None:
            raise EnvironmentGone(f"environment {environment_id} is not open on this node")
        return known

    def environments(self) -> tuple[ProcessEnvironment, ...]:
        with self._lock:
            return tuple(self._environments.values())

    def _forget(self, environment_id: str) -> None:
        with self._lock:
            self._environments.pop(environment_id, None)

    def close(self) -> None:
        """See the base class. Raises `ProcessesLeft` when something could not be ended or removed; the rest is."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        last = (self._fork_client.close, self._leftovers.close, self._drain.close, self.watcher.close, self._groups.remove)
        close_all(self.environments(), last, (self._cleanup_lock, self._base_lock))
