"""The container sandbox: environments as Docker containers on this machine.

What it gives: everything that the process sandbox gives, and besides

* an image for each environment; its container stands idle, at half a per cent of a core at most, until an action runs;
* grants that hold: cores by cpuset, for each session's processes as a group, changed in flight;
* limits for each container on memory (without swap), processes, open files and disk;
* no root, no capabilities, no new privileges, the engine's filter of system calls, no network unless `network` names one, a
  process tree, mounts, IPC and users' memory of its own.

What it does NOT protect from:

* Containers share the host's kernel: a hole in it is a way out. Runtimes with a kernel of their own, such as gVisor, cannot be
  used: they hide processes and files from the host, where grants and files are handled.
* Where the engine's storage cannot hold the limit on disk, it is only watched. A command exceeds it by what it writes between
  two measurements. An environment whose commands do so twice is ended.
* Commands of one environment can do to each other what they like.
* The worker is root on the host.

The engine must be on this machine: commands and their output pass over FIFOs that both sides see, grants over control
files, and files through /proc.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from tangram.errors import TangramError
from workers.cpu.abstract import EnvironmentSpec, Loss, Losses, Sandbox
from workers.cpu.base import close_all, take_base
from workers.cpu.cores import CoreMap
from workers.cpu.disk_floor import DiskFloor
from workers.cpu.docker import disk
from workers.cpu.docker.backend import ContainerBackends, group_of
from workers.cpu.docker.cgroups.choice import ControlGroups
from workers.cpu.docker.container import Container, ContainerMaker
from workers.cpu.docker.engine import DockerEngine
from workers.cpu.docker.environment import ContainerEnvironment
from workers.cpu.docker.files import ContainerFiles
from workers.cpu.docker.images import SNAPSHOTS, Images
from workers.cpu.docker.init import ALIVE, INSIDE, STATES, STATES_INSIDE, WORK
from workers.cpu.docker.keeper_container import start_keeper
from workers.cpu.docker.monitor import ContainerMonitor
from workers.cpu.docker.options import LEAST_MEMORY_MB, ContainerOptions
from workers.cpu.docker.pool import Pool
from workers.cpu.errors import (
    EngineUnavailable,
    EnvironmentExists,
    EnvironmentGone,
    ImageMissing,
    SandboxError,
    SnapshotUnsupported,
)
from workers.cpu.handover.adoption import Adoption
from workers.cpu.handover.fork_client import ForkClient
from workers.cpu.handover.protocol import End, Kept
from workers.cpu.leftovers import Leftovers
from workers.cpu.memory.allowance import Allowance
from workers.cpu.memory.pause_trial import BY_LIMIT, Memory, problem_of
from workers.cpu.memory.watcher import Watcher
from workers.cpu.opening import Opening
from workers.cpu.process.isolation import Folders
from workers.cpu.shell.output import Drain
from workers.cpu.shell.record import Record
from workers.cpu.shell.session_setup import SessionSetup
from workers.cpu.weight import Means
from workers.memory import MIB

log = logging.getLogger(__name__)

DEFAULT_MAX_FILE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class _Entry:
    """An environment, or how it could not be opened, once `opening` is over."""

    opening: Opening
    environment: Future[ContainerEnvironment] = field(default_factory=Future)

    @property
    def stands(self) -> bool:
        """Whether the environment has been opened."""
        return self.environment.done() and self.environment.exception() is None

    def end_open(self, reason: str) -> None:
        """End the open where it is under way."""
        if not self.environment.done():
            self.opening.end(EnvironmentGone(reason))


class ContainerSandbox(Sandbox):
    """Environments of the node `node`; the folder `base` belongs to one living sandbox at a time.

    Raises `SandboxInUse` where another living sandbox has `base`; `EngineUnavailable` where there is no Docker engine, it lacks the network
    that `options` name, or control groups cannot be written here.

    Args:
        base: holds the FIFOs of sessions, at the same path for the engine as for this process.
        node: names the node in labels; containers that an earlier worker of this name has left are removed.
        options: how containers are made.
        core_map: the cores that environments may use.
        max_file_bytes: the most that `read_file` and `write_file` pass in one piece.
        memory: with `elastic`, environments are paused at their allowance where a trial of that works. The trial has a group beside the
            worker's, in version 2 one at the top.
        keep_s: seconds for which environments wait for another sandbox in `base` when this process dies.
        keeper_image: the image of the container that this process is in, if any; what keeps environments runs in one of its own then.

    """

    def __init__(
        self,
        base: Path,
        *,
        node: str,
        options: ContainerOptions | None = None,
        engine: DockerEngine | None = None,
        core_map: CoreMap | None = None,
        max_file_bytes: int = DEFAULT_MAX_FILE_BYTES,
        memory: Memory = "fixed",
        keep_s: float = 0.0,
        keeper_image: str | None = None,
    ) -> None:
        self._options, self._node = options or ContainerOptions(), node
        self._engine = engine or DockerEngine(timeout_s=self._options.start_timeout_s)
        self._core_map = core_map or CoreMap.of_this_process()
        self._max_file_bytes = max_file_bytes
        groups = ControlGroups(self._core_map.available)
        trial, freezer = groups.trial
        self.memory_problem = problem_of(trial, freezer, is_v2=freezer is None) if memory == "elastic" else BY_LIMIT
        if not self._engine.has_network(self._options.network):
            name = self._options.network
            raise EngineUnavailable(f"the Docker engine has no network {name!r}: make it with `docker network create {name}`")
        self._base = Path(os.path.realpath(base))
        self._losses = Losses()
        self._base_lock, self._cleanup_lock, kept = take_base(self._base, ("control", "environments"), keep_s, self._losses.note)
        self._keep_s = keep_s
        starting = (self._engine, keeper_image or "", node, self._base, keep_s, self._options.start_timeout_s)
        start = partial(start_keeper, *starting) if keeper_image else None
        self._fork_client = ForkClient(self._cleanup_lock, self._base, keep_s, kept, self._keep_again, start_keeper=start)
        if start is not None and keep_s > 0 and not self.is_kept():
            self._keep_s, self._fork_client = 0.0, ForkClient(self._cleanup_lock)
        for warning in self._engine.warnings:
            log.warning("%s", warning)
        left, folders = self._engine.left_by(node), list((self._base / "control").iterdir())
        limits = self._options.limits
        self._leftovers = Leftovers()
        self._disk_floor = DiskFloor(self._options.disk_floor_mb, filter(None, (str(self._base), disk.reachable(self._engine.root))))
        self._maker = maker = ContainerMaker(self._engine, self._options, node, self._base / "control", groups, self._leftovers)
        self._images = Images(self._engine, self._options.pull, self._options.pull_s, self._options.image_cache_mb)
        self._pool = Pool(maker, self._images, self._options.warm, limits.memory_mb, self._options.starting_limit, self._leftovers)
        self._monitor, self.watcher = ContainerMonitor(limits.disk_check_s), Watcher()
        self._drain = Drain()
        self._lock = threading.Lock()
        self._environments: dict[str, _Entry] = {}
        self._closed = False
        if kept is not None:
            self._adopt(kept)
        self._remove_left(left, folders)

    def _adopt(self, kept: Kept) -> None:
        """Go on with what the worker before this one has left."""
        given = (self._base / "environments", kept, [self._made()], self._drain, self._fork_client, self._losses.note)
        adoption = Adoption[ContainerEnvironment](*given)
        for environment in adoption.adopt(self._adopted):
            self._environments[environment.spec.id] = entry = _Entry(Opening())
            entry.environment.set_result(environment)
            self._watch(environment)
            environment.container.end_strays(group_of(each.control) for each in environment.setup.record.sessions.values())
            if environment.allowance is not None:
                environment.allowance.adopt()
        self.left_messages = adoption.messages

    def _remove_left(self, containers: Sequence[str], folders: Sequence[Path]) -> None:
        """Remove what an earlier worker has left and nobody goes on with."""
        adopted = [environment.container for environment in self.environments()]
        for left in set(containers) - {each.id for each in adopted}:
            log.info("removing container %s, which an earlier worker has left", left[:12])
            self._engine.remove(left)
        for folder in set(folders) - {each.control for each in adopted}:
            shutil.rmtree(folder, ignore_errors=True)
        if not adopted:
            self._remove_snapshots()

    @property
    def outlives_worker(self) -> bool:
        return self._keep_s > 0

    def is_kept(self) -> bool:
        """See the base class."""
        try:
            self._fork_client.start()
        except SandboxError as error:
            log.warning("environments end with this worker, since what would keep them for the next one cannot be started: %s", error)
            return False
        return True

    @property
    def background(self) -> Means:
        """See the base class; the engine writes control groups, too."""
        return "cgroup"

    def open(self, spec: EnvironmentSpec, opening: Opening | None = None) -> ContainerEnvironment:
        """See the base class.

        Raises `ImageMissing`, `ContainerFailed`, `EngineUnavailable` or `StartTimeout` when its container could not be had; `DiskFull` when
        the disk is too full for one more.
        """
        mine = _Entry(opening or Opening())
        while (entry := self._enter(spec.id, mine)) is not mine:
            mine.opening.phase = "waiting for another open or close of the environment"
            try:
                environment = mine.opening.wait(entry.environment)
            except TangramError:
                mine.opening.check()
                if entry.opening.has_ended:
                    continue
                raise
            if environment.is_closed:
                environment.close()
            elif environment.spec != spec:
                raise EnvironmentExists(f"environment {spec.id} is open with another specification")
            else:
                return environment
        try:
            environment = self._make(spec, mine.opening)
        except BaseException as error:
            self._forget(spec.id)
            mine.environment.set_exception(error)
            raise
        mine.environment.set_result(environment)
        return environment

    def _enter(self, environment_id: str, mine: _Entry) -> _Entry:
        """Return the entry of an environment, which is `mine` where there was none."""
        mine.opening.check()
        with self._lock:
            if self._closed:
                raise EnvironmentGone("the sandbox is closed")
            self._losses.pop(environment_id, None)
            return self._environments.setdefault(environment_id, mine)

    def _make(self, spec: EnvironmentSpec, opening: Opening) -> ContainerEnvironment:
        image = spec.image or self._options.image
        if image is None:
            raise ImageMissing(f"environment {spec.id} names no image, and this node has no default one (TANGRAM_IMAGE)")
        self._disk_floor.check()
        memory_mb = max(LEAST_MEMORY_MB, spec.memory_mb or self._options.limits.memory_mb)
        container = self._pool.take(image, memory_mb, opening)
        folders = Folders(f"{self._base}/environments/{spec.id}")
        own = {"container": container.id, "control": container.control.name, "shell": container.dialect.program}
        record = Record(folders.record, spec, self._made(), {**own, "image": image, "memory_mb": memory_mb})
        try:
            os.makedirs(folders.root, mode=0o700)
            record.write()
            self._keep(spec.id, container)
        except (SandboxError, OSError):
            shutil.rmtree(folders.root, ignore_errors=True)
            self._pool.give_back(container, image)
            raise
        environment = self._built(record, container)
        self._watch(environment)
        return environment

    def _made(self) -> dict[str, object]:
        """Return how this sandbox sets environments up, as JSON has it."""
        options = self._options
        made = {name: getattr(options, name) for name in ("user", "network", "read_only", "runtime")}
        return {"sandbox": "docker", **made, "limits": asdict(options.limits)}

    def _adopted(self, record: Record, folders: Folders, ends: Sequence[End]) -> ContainerEnvironment:
        """Return an environment of the worker before this one, without its sessions."""
        (alive,) = [end.fileno() for end in ends if end.name == ALIVE]
        container = self._maker.adopt(record.own, os.dup(alive))
        self._images.note_use(record.own["image"])
        with suppress(OSError):
            controls = container.group.controls()
            controls.thaw()  # In what is paused, no command can be ended.
            if self.memory_problem:
                # The worker before this one may have granted it less.
                controls.unbound(record.own["memory_mb"] * MIB)
        return self._built(record, container)

    def _keep(self, environment_id: str, container: Container) -> None:
        thawing = container.group.controls().thawing
        self._fork_client.keep(environment_id, container.control.name, {ALIVE: container.alive}, in_container=True, thawing=thawing)

    def _keep_again(self) -> None:
        """Have all environments kept that stand: what kept them was killed, and another one is there."""
        for environment in self.environments():
            with suppress(SandboxError, OSError):  # This one ends.
                self._keep(environment.spec.id, environment.container)
                environment.keep_sessions()

    def _built(self, record: Record, container: Container) -> ContainerEnvironment:
        """Return the environment of a record, in its container."""
        spec, image = record.spec, record.own["image"]
        if not self.memory_problem:
            container.allowance = Allowance(spec.id, record.own["memory_mb"], container.group.controls(), self.watcher)
        setup = SessionSetup(
            backends=ContainerBackends(container, self._core_map, spec.id, self._fork_client),
            drain=self._drain,
            dialect=container.dialect,
            control_folder=str(container.control),
            control_inside=INSIDE,
            home=WORK,
            start_timeout_s=self._options.start_timeout_s,
            state_folder=f"{container.control}/{STATES}",
            state_inside=STATES_INSIDE,
            record=record,
        )
        files = ContainerFiles(container, self._options.uid, self._options.gid, self._max_file_bytes)

        def give_back(container: Container) -> None:
            self._monitor.forget(container)
            self._pool.give_back(container, image)
            self._fork_client.keep(spec.id, container.control.name, {}, in_container=True)
            shutil.rmtree(os.path.dirname(record.path), ignore_errors=True)

        return ContainerEnvironment(spec, container, files, setup, self._forget, give_back)

    def _watch(self, environment: ContainerEnvironment) -> None:
        """Have the end of an environment's container noticed."""
        container = environment.container

        def lose() -> None:
            self._note_loss(Loss(environment.spec.id, container.loss(), container.loss_cause))
            environment.lose()

        self._monitor.add(container, lambda: environment.is_busy, lose)

    def _note_loss(self, loss: Loss) -> None:
        with self._lock:
            self._losses.note(loss)

    def losses(self) -> tuple[Loss, ...]:
        with self._lock:
            return tuple(self._losses.values())

    def get(self, environment_id: str) -> ContainerEnvironment:
        with self._lock:
            known, loss = self._environments.get(environment_id), self._losses.get(environment_id)
        if loss is not None:
            raise EnvironmentGone(f"environment {environment_id} is lost: {loss.reason}", loss.cause)
        if known is None or not known.stands:
            raise EnvironmentGone(f"environment {environment_id} is not open on this node")
        return known.environment.result()

    def snapshot(self, environment_id: str) -> str:
        """Make an image of an environment's files as they are now, and return its reference, good on this node.

        Raises `EnvironmentGone` when it is not open here; `SnapshotUnsupported` when the files are in memory (`read_only`);
        `ContainerFailed` when the engine refuses.
        """
        environment = self.get(environment_id)
        if self._options.read_only:
            raise SnapshotUnsupported("environments whose work folder is in memory have no snapshots")
        return environment.snapshot(SNAPSHOTS, secrets.token_hex(8), self._node)

    def close_environment(self, environment_id: str) -> None:
        """Close an environment; an open of it that is under way ends. See the base class."""
        with self._lock:
            known = self._environments.get(environment_id)
        if known is not None:
            known.end_open(f"environment {environment_id} was closed while it was opened")
            if known.environment.exception() is None:
                known.environment.result().close()

    def environments(self) -> tuple[ContainerEnvironment, ...]:
        with self._lock:
            known = list(self._environments.values())
        return tuple(each.environment.result() for each in known if each.stands)

    def _forget(self, environment_id: str) -> None:
        with self._lock:
            self._environments.pop(environment_id, None)

    def close(self) -> None:
        """Close every environment; see the base class. Raises `ProcessesLeft` when something could not be ended or removed; the rest is."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            known = list(self._environments.values())
        for entry in known:
            entry.end_open("the sandbox is closed")
        living = [each.environment.result() for each in known if each.environment.exception() is None]
        last = (self._pool.close, self._monitor.close, self.watcher.close, self._drain.close, self._leftovers.close, self._remove_snapshots)
        close_all(living, (*last, self._fork_client.close, self._engine.close), (self._cleanup_lock, self._base_lock))

    def _remove_snapshots(self) -> None:
        self._engine.remove_snapshots(self._node)
