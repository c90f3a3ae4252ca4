"""The process sandbox: environments without containers, root, or a server.

What it gives: a folder, a home and temporary files of its own for each environment; shells with a bare environment (no
variable of the worker's gets in); process trees that can be held to cores and ended as a whole, wherever their
processes hide; no new privileges (setuid programs gain nothing); limits as in `ProcessLimits`.

What it does NOT protect from. Commands run as the worker's own operating-system user, so they can read and write
whatever that user can: files of other environments and of the worker, the worker's memory and its environment
variables in /proc, and they can signal its processes. There is no network isolation, no limit on memory (unless
`address_space` is set) or disk, and none on the number of processes of one environment: a fork bomb reaches the whole
machine. Core affinity is a convention that a program can undo for itself. Run untrusted code in containers, or run the
worker as a user who owns nothing else on a machine that holds nothing else.

Between two actions, processes that a command left behind are *parked*: they get only time that nobody else wants
(SCHED_IDLE), on any core. See `tree.unpark` for what happens at the next action.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path

from workers.cpu.abstract import EnvironmentSpec, Sandbox
from workers.cpu.base import take_base
from workers.cpu.cores import CoreMap
from workers.cpu.errors import EnvironmentExists, EnvironmentGone, ImageUnsupported, ProcessesLeft
from workers.cpu.process.environment import ProcessEnvironment
from workers.cpu.process.files import Files
from workers.cpu.process.limits import ProcessLimits
from workers.cpu.process.nursery import Nursery
from workers.cpu.process.warden import KeeperWardens, ShellSetup
from workers.cpu.shell.dialect import Dialect
from workers.cpu.shell.output import Drain
from workers.cpu.shell.session import SessionSetup

DEFAULT_MAX_FILE_BYTES = 64 << 20


class ProcessSandbox(Sandbox):
    """Environments below the folder `base`, which belongs to one living sandbox at a time.

    Args:
        base: holds everything; what an earlier sandbox left in it is removed.
        shell: the shell program; by default bash, where there is none, sh.
        search_path: PATH of the commands; by default the worker's own.
        variables: further environment variables of every command.
        limits: resource limits of every process.
        start_timeout_s: how long a shell may take to come up.
        max_file_bytes: the most that `read_file` and `write_file` pass in one piece.

    Raises:
        SandboxInUse: another living sandbox has `base`.
        SessionUnavailable: there is no such shell.

    """

    def __init__(
        self,
        base: Path,
        *,
        shell: str | None = None,
        search_path: str | None = None,
        variables: Mapping[str, str] | None = None,
        limits: ProcessLimits | None = None,
        start_timeout_s: float = 10.0,
        max_file_bytes: int = DEFAULT_MAX_FILE_BYTES,
    ) -> None:
        self._dialect = Dialect.find(shell)
        self._search_path = search_path or os.environ.get("PATH", os.defpath)
        self._variables = dict(variables or {})
        self._limits = limits or ProcessLimits()
        self._start_timeout_s, self._max_file_bytes = start_timeout_s, max_file_bytes
        self._base = Path(os.path.realpath(base))
        self._base_lock = take_base(self._base, ("environments", "control"))
        self._core_map = CoreMap.of_this_process()
        self._nursery, self._drain = Nursery(), Drain()
        self._lock = threading.Lock()
        self._environments: dict[str, ProcessEnvironment] = {}
        self._closed = False

    def open(self, spec: EnvironmentSpec) -> ProcessEnvironment:
        """Open an environment; see the base class.

        Raises:
            ImageUnsupported: the specification has an image.

        """
        if spec.image is not None:
            raise ImageUnsupported(f"the process sandbox has no images, so it cannot open {spec.image!r}")
        with self._lock:
            if self._closed:
                raise EnvironmentGone("the sandbox is closed")
            known = self._environments.get(spec.id)
            if known is None:
                known = self._environments[spec.id] = self._make(spec)
        if known.spec != spec:
            raise EnvironmentExists(f"environment {spec.id} is open with another specification")
        return known

    def _make(self, spec: EnvironmentSpec) -> ProcessEnvironment:
        root = self._base / "environments" / spec.id
        files = Files(root, root / "work", self._max_file_bytes)
        for folder in (root, files.work, root / "tmp"):
            folder.mkdir(mode=0o700)
        home, control = str(files.work), self._base / "control"
        limits = self._limits.as_rlimits(spec.memory_mb)
        shells = ShellSetup(dialect=self._dialect, home=home, variables=self._shell_variables(root), limits=limits)
        setup = SessionSetup(
            wardens=KeeperWardens(self._nursery, shells, self._core_map),
            drain=self._drain,
            dialect=self._dialect,
            control_folder=control,
            control_inside=str(control),
            home=home,
            start_timeout_s=self._start_timeout_s,
        )
        return ProcessEnvironment(spec, files, setup, self._forget)

    def _shell_variables(self, root: Path) -> dict[str, str]:
        return {
            "PATH": self._search_path,
            "HOME": str(root / "work"),
            "TMPDIR": str(root / "tmp"),
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "SHELL": self._dialect.program,
            **self._variables,
        }

    def get(self, environment_id: str) -> ProcessEnvironment:
        """Return an open environment; see the base class."""
        with self._lock:
            known = self._environments.get(environment_id)
        if known is None:
            raise EnvironmentGone(f"environment {environment_id} is not open on this node")
        return known

    def environments(self) -> tuple[ProcessEnvironment, ...]:
        """Return the open environments, in the order of their opening."""
        with self._lock:
            return tuple(self._environments.values())

    def _forget(self, environment_id: str) -> None:
        with self._lock:
            self._environments.pop(environment_id, None)

    def close(self) -> None:
        """Close every environment; see the base class.

        Raises:
            ProcessesLeft: processes of some environment could not be ended.

        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        living = self.environments()
        problems: list[str] = []
        # All are told first, so that their grace periods run at the same time.
        for environment in living:
            environment.hang_up()
        for environment in living:
            try:
                environment.close()
            except ProcessesLeft as error:
                problems.append(str(error))
        self._nursery.close()
        self._drain.close()
        os.close(self._base_lock)
        if problems:
            raise ProcessesLeft("; ".join(problems))
