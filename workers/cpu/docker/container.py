"""One container: made, started, given to an environment, gone.

| state    | meaning                                                         | next                                 |
|----------|-----------------------------------------------------------------|--------------------------------------|
| made     | the engine has it, nothing runs                                 | started in time: standing; else gone |
| standing | its attendant waits; no environment has it yet (a warm one)     | given, or removed                    |
| given    | it is an environment's, with the memory of that                 | removed, or its process 1 ended      |
| gone     | nothing is left of it                                           |                                      |

The worker holds three things of it: the writing end of `alive`, which keeps the attendant waiting; a descriptor of
process 1, readable once that has ended; and the control groups through which grants are written.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from workers.cpu.docker.attendant import ALIVE, HELLO, INSIDE, SCRIPT
from workers.cpu.docker.cgroups.abstract import ContainerGroup
from workers.cpu.docker.engine import ContainerSpec, Engine
from workers.cpu.docker.options import ContainerOptions
from workers.cpu.errors import ContainerFailed, StartTimeout
from workers.cpu.shell.dialect import READ_BY_SHELL, WRITTEN_BY_SHELL, Dialect, make_fifo

WORK, TEMPORARY = "/work", "/tmp"

Groups = Callable[[str, int], ContainerGroup]
"""Gives the control groups of a container by its id and its process 1."""


class Container:
    """A container that stands. Made by `ContainerMaker`; any thread may use it."""

    def __init__(self, engine: Engine, container_id: str, control: Path, alive: int, memory_mb: int, disk_mb: int) -> None:
        self.id, self.control, self.memory_mb = container_id, control, memory_mb
        self.engine = engine
        self._alive = alive
        self.pid = 0
        self.ended = -1
        self.dialect = Dialect.of("/bin/sh")
        self.group: ContainerGroup
        self.disk_mb = disk_mb
        self.written_mb = 0.0
        """What it had written to its own layer when the engine was asked last; 0 where the engine holds it to the bound."""

    def begin(self, groups: Groups, deadline: float) -> None:
        """Start it, and return once its attendant waits.

        Raises:
            ContainerFailed: it ended instead.
            StartTimeout: it was not up by `deadline`.

        """
        hello = os.open(self.control / HELLO, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            self.pid = self.engine.start(self.id)
            try:
                self.ended = os.pidfd_open(self.pid)
            except ProcessLookupError:
                raise ContainerFailed(
                    "a container's process 1 cannot be seen: it has ended, or the worker is not in the engine's process namespace"
                ) from None
            self.dialect = Dialect.of(self._await_hello(hello, deadline))
        finally:
            os.close(hello)
        self.group = groups(self.id, self.pid)

    def _await_hello(self, hello: int, deadline: float) -> str:
        """Return the shell that the attendant has found."""
        poller = select.poll()
        poller.register(hello, select.POLLIN)
        poller.register(self.ended, select.POLLIN)
        said = b""
        while not said.endswith(b"\n"):
            left_s = deadline - time.monotonic()
            ready = {descriptor for descriptor, _ in poller.poll(max(0.0, left_s) * 1000)}
            if hello in ready:
                said += os.read(hello, 4096)
            elif self.ended in ready:
                raise ContainerFailed(f"a container ended as soon as it was started: {self.engine.state(self.id) or 'unknown why'}")
            elif left_s <= 0:
                raise StartTimeout("a container did not come up in time")
        return said.decode(errors="replace").split()[0]

    def bury(self) -> None:
        """Have the attendant collect the processes that have ended."""
        # A full pipe means that it has more than enough to read already.
        with contextlib.suppress(BlockingIOError):
            os.write(self._alive, b"\n")

    def look_at_disk(self) -> None:
        """Ask the engine what it has written."""
        self.written_mb = self.engine.written_bytes(self.id) / (1 << 20)

    def has_ended(self) -> bool:
        """Say whether its process 1 is gone, and all others with it."""
        poller = select.poll()
        poller.register(self.ended, select.POLLIN)
        return bool(poller.poll(0))

    def set_memory(self, memory_mb: int) -> None:
        """Hold it to another amount of memory."""
        if memory_mb != self.memory_mb:
            self.engine.update_memory(self.id, memory_mb)
            self.memory_mb = memory_mb

    def remove(self) -> None:
        """End and remove it, and its control folder."""
        try:
            self.engine.remove(self.id)
        finally:
            for descriptor in (self._alive, self.ended):
                if descriptor >= 0:
                    os.close(descriptor)
            self._alive = self.ended = -1
            shutil.rmtree(self.control, ignore_errors=True)


class ContainerMaker:
    """Makes containers of a node, whose control folders lie in `folder`."""

    def __init__(self, engine: Engine, options: ContainerOptions, node: str, folder: Path, groups: Groups) -> None:
        self._engine, self._options, self._node, self._folder, self._groups = engine, options, node, folder, groups
        self._disk_hard: bool | None = None

    def make(self, image: str, memory_mb: int) -> Container:
        """Make and start a container.

        Raises:
            ContainerFailed, ImageMissing, EngineUnavailable: as their names say.
            StartTimeout: it did not stand within `start_timeout_s`.

        """
        deadline = time.monotonic() + self._options.start_timeout_s
        name = secrets.token_hex(8)
        control = self._folder / name
        _make_control(control)
        alive = os.open(control / ALIVE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        container: Container | None = None
        try:
            container_id = self._engine.create(self._spec(image, memory_mb, name, control))
            container = Container(self._engine, container_id, control, alive, memory_mb, self._options.limits.disk_mb)
            if not self._options.read_only:
                uid, gid = self._options.uid, self._options.gid
                self._engine.put_folders(container_id, [(WORK, uid, gid, 0o755), (TEMPORARY, 0, 0, 0o1777)])
            container.begin(self._groups, deadline)
        except BaseException:
            if container is not None:
                container.remove()
            else:
                os.close(alive)
                shutil.rmtree(control, ignore_errors=True)
            raise
        return container

    def _spec(self, image: str, memory_mb: int, name: str, control: Path) -> ContainerSpec:
        options, limits = self._options, self._options.limits
        if self._disk_hard is None:
            self._disk_hard = not options.read_only and self._engine.can_limit_disk(image)
        return ContainerSpec(
            name=f"tangram-{name}",
            node=self._node,
            image=image,
            command=("/bin/sh", "-c", SCRIPT),
            environment={"HOME": WORK, "TMPDIR": TEMPORARY, "LANG": "C.UTF-8", "TERM": "dumb"},
            user=options.user,
            work=WORK,
            control=str(control),
            control_inside=INSIDE,
            memory_mb=memory_mb,
            processes=limits.processes,
            open_files=limits.open_files,
            disk_mb=limits.disk_mb,
            disk_hard=self._disk_hard,
            network=options.network,
            read_only=options.read_only,
            runtime=options.runtime,
        )


def _make_control(control: Path) -> None:
    control.mkdir(mode=0o755)
    # The worker's umask must not keep the container's user out.
    os.chmod(control, 0o755)
    make_fifo(str(control / ALIVE), READ_BY_SHELL)
    make_fifo(str(control / HELLO), WRITTEN_BY_SHELL)
