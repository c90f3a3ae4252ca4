"""One container: made, started, given to an environment, gone.

| state    | meaning                                                         | next                                 |
|----------|-----------------------------------------------------------------|--------------------------------------|
| made     | the engine has it, nothing runs                                 | started in time: standing; else gone |
| standing | its init waits; no environment has it yet (a warm one)          | given, or removed                    |
| given    | it is an environment's, with the memory of that                 | removed, or its process 1 ended      |
| gone     | nothing is left of it                                           |                                      |

The worker holds three things of it: the writing end of `alive`, which keeps the container init waiting; a descriptor of
process 1, readable once that has ended; and the control groups through which grants are written. Of the first there is a copy in the
process that keeps environments for the next worker (`handover/protocol.py`), once it is an environment's.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from workers.cpu.docker import disk
from workers.cpu.docker.cgroups.abstract import ContainerGroup
from workers.cpu.docker.engine import MEMORY_FULL, ContainerSpec, DockerEngine
from workers.cpu.docker.init import ALIVE, FORMER, HELLO, STATES, TEMPORARY, WORK
from workers.cpu.docker.options import ContainerOptions
from workers.cpu.errors import ContainerFailed, StartTimeout
from workers.cpu.leftovers import Leftovers
from workers.cpu.memory.allowance import Allowance
from workers.cpu.opening import Opening
from workers.cpu.process import tree
from workers.cpu.shell.dialect import READ_BY_SHELL, WRITTEN_BY_SHELL, Dialect, make_fifo

MOST_DISK_VIOLATIONS = 1
LONGEST_HELLO = 4096
CHECK_S = 0.1
"""How often the start of a container checks whether it is to go on."""
STAT_FLAGS, PF_EXITING = 6, 0x4
"""Where /proc/<pid>/stat has the flags of a process, counted from its state; the flag of one that is ending."""
STAT_PENDING, PENDING_SIGKILL = 28, 1 << (signal.SIGKILL - 1)
"""Where it has the signals that wait for the process; the one of SIGKILL."""
NAME_PREFIX = "tangram-"

Groups = Callable[[int], ContainerGroup]
"""Gives the control groups of a container by its process 1."""


class Container:
    """A container that stands. Made by `ContainerMaker`; any thread may use it."""

    def __init__(self, engine: DockerEngine, container_id: str, control: Path, alive: int, memory_mb: int, disk_mb: int) -> None:
        self.id, self.control, self.memory_mb = container_id, control, memory_mb
        self.engine = engine
        self.alive = alive
        self._descriptors = threading.Lock()
        self.pid = 0
        self.ended = -1
        self.dialect = Dialect.of("/bin/sh")
        self.group: ContainerGroup
        self.allowance: Allowance | None = None
        """Its memory, once it is an environment's."""
        self.disk_mb = disk_mb
        self.written_mb = 0.0
        """What it had written when that was measured last."""
        self.layer, self.volumes = "", tuple[str, ...]()
        """Where it writes on the engine's host: its own layer, empty where there is no telling, and its image's volumes."""
        self.disk_violations, self._violated_at = 0, float("-inf")
        """How many of its commands were ended since they wrote more than it may."""
        self.oom_kills_reported = 0
        """How many of its processes the kernel had ended for want of memory when a command reported it last."""
        self.end_reason = ""
        """Why this worker ended it before its environment was closed."""
        self.loss_cause = ""
        """Why it has ended before it was removed, once `loss` has said so (`tangram/ends.py`)."""
        self._loss, self._is_removed, self._losing = "", False, threading.Lock()

    def begin(self, groups: Groups, deadline: float, opening: Opening) -> None:
        """Start it, and return once its init waits.

        Raises `ContainerFailed` when it ended instead, or its control groups cannot be used; `StartTimeout` when it was not up by
        `deadline`.
        """
        hello = os.open(self.control / HELLO, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            self.engine.start(self.id)
            self._watch()
            self.dialect = Dialect.of(self._await_hello(hello, deadline, opening))
            # Before any command, which could otherwise keep it open.
            os.chmod(self.control / ALIVE, READ_BY_SHELL)
        finally:
            os.close(hello)
        self._take_groups(groups)

    def resume(self, groups: Groups, shell: str) -> None:
        """Go on with it, which an earlier worker has left, and which has this shell. Raises `ContainerFailed` where it has ended."""
        self._watch()
        self.dialect = Dialect.of(shell)
        self._take_groups(groups)
        self.oom_kills_reported = self.group.oom_kills()

    def _watch(self) -> None:
        self.pid, self.layer, self.volumes = self.engine.running(self.id)
        try:
            self.ended = os.pidfd_open(self.pid)
        except ProcessLookupError:
            raise ContainerFailed(
                "a container's process 1 cannot be seen: it has ended, or the worker is not in the engine's process namespace"
            ) from None

    def _take_groups(self, groups: Groups) -> None:
        try:
            self.group = groups(self.pid)
        except OSError as error:
            raise ContainerFailed(f"a container's control groups cannot be used: {error}") from error

    def end_strays(self, sessions: Iterable[str]) -> None:
        """Kill what is in the groups of none of these sessions: a shell that was about to start, a session that was about to end."""
        for process in map(tree.read_process, self.group.strays(sessions)):
            if process is not None and process.pid != self.pid:
                tree.send(process, signal.SIGKILL)

    def _await_hello(self, hello: int, deadline: float, opening: Opening) -> str:
        """Return the shell that the container init has found."""
        poller = select.poll()
        poller.register(hello, select.POLLIN)
        poller.register(self.ended, select.POLLIN)
        said = b""
        while not said.endswith(b"\n"):
            if len(said) > LONGEST_HELLO:
                raise ContainerFailed("the image's /bin/sh is no shell")
            opening.check()
            left_s = deadline - time.monotonic()
            ready = {descriptor for descriptor, _ in poller.poll(max(0.0, min(left_s, CHECK_S)) * 1000)}
            if hello in ready:
                said += os.read(hello, 4096)
            elif self.ended in ready:
                raise ContainerFailed(f"a container ended as soon as it was started: {self.engine.state(self.id) or 'unknown why'}")
            elif left_s <= 0:
                raise StartTimeout("a container did not come up in time")
        return said.decode(errors="replace").strip() or "/bin/sh"

    def reap(self) -> None:
        """Have the container init collect the processes that have ended."""
        # A full pipe means that it has more than enough to read already.
        with self._descriptors, contextlib.suppress(BlockingIOError):
            if self.alive >= 0:
                os.write(self.alive, b"\n")

    def measure_disk(self) -> None:
        """Take note of what it has written."""
        if self.has_ended():
            return
        layer, *volumes = map(disk.reachable, (self.layer, *self.volumes))
        seen = [path for path in (layer, *volumes) if path is not None]
        nameless = disk.nameless_bytes([f"/proc/{self.pid}/root", *seen], self.group.processes())
        named = disk.taken_bytes(seen) + (self.engine.written_bytes(self.id) if layer is None else 0)
        self.written_mb = (named + disk.taken_bytes((self.control,)) + nameless) / (1 << 20)

    def note_disk_violation(self, began: float) -> None:
        """Count a command that has written too much, and that began at `began` on the monotonic clock.

        Of commands that ran side by side one counts, since nobody knows which of them wrote.
        """
        with self._descriptors:
            if began > self._violated_at:
                self.disk_violations += 1
                self._violated_at = time.monotonic()

    def enforce_disk_limit(self) -> None:
        """End it where its commands have written more than it may for a second time.

        After the first time a command may clear up. It may write as much as there is already, so this bounds what is written in all.
        """
        if self.written_mb > self.disk_mb:
            self.measure_disk()
        if self.disk_violations > MOST_DISK_VIOLATIONS:
            self.end(f"the environment went on to write after {self.disk_mb} MB, the most that it may have on disk")

    def loss(self) -> str:
        """Return why it has ended before it was removed; nothing while it stands, and where it was removed."""
        with self._losing:
            if not self._loss and not self._is_removed and self.is_ending():
                is_full = self._new_oom_kills()  # First: the engine removes the control group soon.
                how = MEMORY_FULL if is_full else self.engine.state(self.id, may_be_full=is_full is None)
                self.loss_cause = "disk_limit" if self.end_reason else "out_of_memory" if how == MEMORY_FULL else "environment_lost"
                self._loss = self.end_reason or f"its container ended{f': {how}' if how else ''}"
            return self._loss

    def _new_oom_kills(self) -> bool | None:
        """Say whether the kernel has ended processes that no command has reported; None once the control group has gone."""
        try:
            return self.group.oom_kills() > self.oom_kills_reported
        except OSError:
            return None

    def end(self, reason: str) -> None:
        """Have the engine end it; whoever watches it learns `reason`."""
        self.end_reason = self.end_reason or reason
        if self.allowance is not None:
            self.allowance.close()
        self.engine.remove(self.id)

    def has_ended(self) -> bool:
        """Say whether its process 1 is gone, and all others with it."""
        with self._descriptors:
            if self.ended < 0:
                return True
            poller = select.poll()
            poller.register(self.ended, select.POLLIN)
            return bool(poller.poll(0))

    def is_ending(self) -> bool:
        """Say whether its process 1 has begun to end, or is about to: the kernel ends all others before that is gone."""
        try:
            with open(f"/proc/{self.pid}/stat", "rb", buffering=0) as file:
                fields = file.read(4096).rpartition(b")")[2].split()
        except OSError:
            return True
        is_killed = bool(int(fields[STAT_PENDING]) & PENDING_SIGKILL)
        return is_killed or bool(int(fields[STAT_FLAGS]) & PF_EXITING) or self.has_ended()

    def set_memory(self, memory_mb: int) -> None:
        """Hold it to another amount of memory."""
        if memory_mb != self.memory_mb:
            self.engine.update_memory(self.id, memory_mb)
            self.memory_mb = memory_mb

    def remove(self) -> None:
        """End and remove it, and its control folder."""
        self._is_removed = True
        try:
            self.engine.remove(self.id)
        finally:
            with self._descriptors:
                for descriptor in (self.alive, self.ended):
                    if descriptor >= 0:
                        os.close(descriptor)
                self.alive = self.ended = -1
            shutil.rmtree(self.control, ignore_errors=True)


class ContainerMaker:
    """Makes containers of a node, whose control folders lie in `folder`."""

    def __init__(
        self,
        engine: DockerEngine,
        options: ContainerOptions,
        node: str,
        folder: Path,
        groups: Groups,
        leftovers: Leftovers,
    ) -> None:
        self._engine, self._options, self._node, self._folder, self._groups = engine, options, node, folder, groups
        self._leftovers = leftovers
        self._disk_hard: bool | None = None

    def make(self, image: str, memory_mb: int, opening: Opening) -> Container:
        """Make and start a container. Nothing is left of it where that fails or `opening` ends.

        Raises `ContainerFailed`, `ImageMissing` or `EngineUnavailable` as their names say; `StartTimeout` when it did not stand within
        `start_timeout_s`.
        """
        deadline = time.monotonic() + self._options.start_timeout_s
        name = secrets.token_hex(8)
        control = self._folder / name
        container, alive = None, -1
        try:
            _make_control(control)
            alive = os.open(control / ALIVE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            container_id = self._engine.create(self._spec(image, memory_mb, name, control))
            container = Container(self._engine, container_id, control, alive, memory_mb, self._options.limits.disk_mb)
            opening.check()
            if not self._options.read_only:
                uid, gid = self._options.uid, self._options.gid
                self._engine.put_folders(container_id, [(WORK, uid, gid, 0o755), (TEMPORARY, 0, 0, 0o1777)], (FORMER, WORK))
            opening.check()
            container.begin(self._groups, deadline, opening)
        except BaseException:
            if container is not None:
                self._leftovers.removed(f"container {container.id[:12]}", container.remove)
            else:
                if alive >= 0:
                    os.close(alive)
                shutil.rmtree(control, ignore_errors=True)
                # An engine that is slow to answer may have made it all the same.
                self._leftovers.removed(f"container {NAME_PREFIX}{name}", lambda: self._engine.remove(f"{NAME_PREFIX}{name}"))
            raise
        return container

    def adopt(self, own: Mapping[str, Any], alive: int) -> Container:
        """Return a container that an earlier worker has left, by what its record says; it is removed where that fails.

        Raises `ContainerFailed` or `EngineUnavailable` as their names say.
        """
        control, disk_mb = self._folder / own["control"], self._options.limits.disk_mb
        container = Container(self._engine, own["container"], control, alive, own["memory_mb"], disk_mb)
        try:
            container.resume(self._groups, own["shell"])
        except BaseException:
            self._leftovers.removed(f"container {container.id[:12]}", container.remove)
            raise
        return container

    def _spec(self, image: str, memory_mb: int, name: str, control: Path) -> ContainerSpec:
        if self._disk_hard is None:
            self._disk_hard = not self._options.read_only and self._engine.can_limit_disk(image, self._node)
        return ContainerSpec(
            name=f"{NAME_PREFIX}{name}",
            node=self._node,
            image=image,
            control=control,
            memory_mb=memory_mb,
            disk_hard=self._disk_hard,
            options=self._options,
        )


def _make_control(control: Path) -> None:
    control.mkdir(mode=0o755)
    # The worker's umask must not keep the container's user out.
    os.chmod(control, 0o755)
    (control / STATES).mkdir()
    os.chmod(control / STATES, 0o755)
    # Until the container init has opened it; see `init.py`.
    make_fifo(str(control / ALIVE), WRITTEN_BY_SHELL)
    make_fifo(str(control / HELLO), WRITTEN_BY_SHELL)
