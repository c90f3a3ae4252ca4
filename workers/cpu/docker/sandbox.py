"""The container sandbox: environments as Docker containers on this machine.

What it gives: everything that the process sandbox gives, and besides

* an image for each environment; its container stands idle, at half a per cent of a core at most, until an action runs;
* grants that hold: cores by cpuset, for each session's processes as a group, changed in flight;
* limits for each container on memory (without swap), processes, open files and disk;
* no root, no capabilities, no new privileges, the engine's filter of system calls, no network, a process tree, mounts,
  IPC and users' memory of its own;
* with an allow-list (`allow`), a network on which containers reach what that names and nothing else.

What it does NOT protect from. Containers share the host's kernel: a hole in that is a way out. (Runtimes with a kernel of
their own, such as gVisor, hide processes and files from the host, where grants and files are handled; they are not
served.) The bound on disk is watched, not enforced, where the engine's storage cannot hold it: a command goes past it by
what it writes between two looks, and an environment that does so twice is ended. Commands of one environment can do to
each other what they like. Who may speak to the engine is root on the host, so the worker is, too.

The engine must be on this machine: commands and their output pass over FIFOs that both sides see, grants over control
files, and files through /proc. Where that is not so, opening an environment says what is missing.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from concurrent.futures import Future
from pathlib import Path

from workers.cpu.abstract import EnvironmentSpec, Sandbox
from workers.cpu.base import take_base
from workers.cpu.cores import CoreMap
from workers.cpu.docker.attendant import INSIDE, STATES, STATES_INSIDE
from workers.cpu.docker.cgroups.choice import CgroupsOf, Way
from workers.cpu.docker.container import WORK, Container, ContainerMaker
from workers.cpu.docker.engine import Engine
from workers.cpu.docker.environment import ContainerEnvironment
from workers.cpu.docker.files import ContainerFiles
from workers.cpu.docker.images import SNAPSHOTS, Images
from workers.cpu.docker.network import AllowedNetwork, open_network
from workers.cpu.docker.options import ContainerOptions
from workers.cpu.docker.pool import Pool
from workers.cpu.docker.warden import ContainerWardens
from workers.cpu.docker.watch import Watch
from workers.cpu.errors import EnvironmentExists, EnvironmentGone, ImageMissing, ProcessesLeft, SandboxError, SnapshotUnsupported
from workers.cpu.shell.output import Drain
from workers.cpu.shell.session import SessionSetup
from workers.cpu.weight import Means

log = logging.getLogger(__name__)

DEFAULT_MAX_FILE_BYTES = 64 << 20


class ContainerSandbox(Sandbox):
    """Environments of the node `node`; the folder `base` belongs to one living sandbox at a time.

    Args:
        base: holds the FIFOs of sessions, at the same path for the engine as for this process.
        node: names the node in labels; containers that an earlier worker of this name has left are removed.
        options: how containers are made.
        core_map: the cores that environments may use.
        way: how grants are written; by default the best that works here.
        max_file_bytes: the most that `read_file` and `write_file` pass in one piece.

    Raises:
        SandboxInUse: another living sandbox has `base`.
        EngineUnavailable: there is no Docker engine, or its containers cannot be held to `options.allow` here.
        InvalidAction: a name in `options.allow` cannot be looked up.

    """

    def __init__(
        self,
        base: Path,
        *,
        node: str,
        options: ContainerOptions | None = None,
        engine: Engine | None = None,
        core_map: CoreMap | None = None,
        way: Way | None = None,
        max_file_bytes: int = DEFAULT_MAX_FILE_BYTES,
    ) -> None:
        self._options, self._node = options or ContainerOptions(), node
        self._engine = engine or Engine(timeout_s=self._options.start_timeout_s)
        self._core_map = core_map or CoreMap.of_this_process()
        self._max_file_bytes = max_file_bytes
        self._base = Path(os.path.realpath(base))
        self._base_lock = take_base(self._base, ("control",))
        for warning in self._engine.warnings:
            log.warning("%s", warning)
        for left in self._engine.left_by(node):
            log.info("removing container %s, which an earlier worker has left", left[:12])
            self._engine.remove(left)
        self._engine.remove_snapshots(node)
        groups = CgroupsOf(self._core_map.available, self._engine.update_cores, way)
        limits = self._options.limits
        self._network = self._open_network()
        maker = ContainerMaker(self._engine, self._options, node, self._base / "control", groups, self._network)
        self._images = Images(self._engine, self._options.pull, self._options.image_cache_mb)
        self._pool = Pool(maker, self._images, self._options.warm, limits.memory_mb, self._options.starting_limit)
        self._watch = Watch(limits.disk_look_s)
        self._drain = Drain()
        self._lock = threading.Lock()
        self._environments: dict[str, Future[ContainerEnvironment]] = {}
        self._closed = False

    @property
    def background(self) -> Means:
        """See the base class; the engine writes control groups, too."""
        return "cgroup"

    def _open_network(self) -> AllowedNetwork | None:
        """Return the network that holds containers to the allow-list; None without one. A refusal gives the folder back."""
        try:
            return open_network(self._engine, self._node, self._options.allowed)
        except BaseException:
            self._engine.close()
            os.close(self._base_lock)
            raise

    def open(self, spec: EnvironmentSpec) -> ContainerEnvironment:
        """Open an environment; see the base class.

        Raises:
            ImageMissing, ContainerFailed, EngineUnavailable, StartTimeout: its container could not be had.

        """
        while True:
            with self._lock:
                if self._closed:
                    raise EnvironmentGone("the sandbox is closed")
                known = self._environments.get(spec.id)
                if known is None:
                    made = self._environments[spec.id] = Future()
                    break
            environment = known.result()
            if environment.is_closed:
                # One of that name is on its way out; its room is waited for.
                environment.close()
                continue
            if environment.spec != spec:
                raise EnvironmentExists(f"environment {spec.id} is open with another specification")
            return environment
        try:
            environment = self._make(spec)
        except BaseException as error:
            self._forget(spec.id)
            made.set_exception(error)
            raise
        made.set_result(environment)
        return environment

    def _make(self, spec: EnvironmentSpec) -> ContainerEnvironment:
        image = spec.image or self._options.image
        if image is None:
            raise ImageMissing(f"environment {spec.id} names no image, and this node has no default one (TANGRAM_IMAGE)")
        memory_mb = spec.memory_mb or self._options.limits.memory_mb
        container = self._pool.take(image, memory_mb, self._options.start_timeout_s)
        setup = SessionSetup(
            backends=ContainerWardens(container, self._core_map),
            drain=self._drain,
            dialect=container.dialect,
            control_folder=container.control,
            control_inside=INSIDE,
            home=WORK,
            start_timeout_s=self._options.start_timeout_s,
            state_folder=container.control / STATES,
            state_inside=STATES_INSIDE,
        )
        files = ContainerFiles(container, self._options.uid, self._options.gid, self._max_file_bytes)

        def give_back(container: Container) -> None:
            self._watch.forget(container)
            self._pool.give_back(container, image)

        environment = ContainerEnvironment(spec, container, files, setup, self._forget, give_back)
        self._watch.add(container, lambda: environment.is_busy, environment.lose)
        return environment

    def get(self, environment_id: str) -> ContainerEnvironment:
        """Return an open environment; see the base class."""
        with self._lock:
            known = self._environments.get(environment_id)
        if known is None or not known.done() or known.exception() is not None:
            raise EnvironmentGone(f"environment {environment_id} is not open on this node")
        return known.result()

    def snapshot(self, environment_id: str) -> str:
        """Make an image of an environment's files as they are now, and return its reference, good on this node.

        Raises:
            EnvironmentGone: it is not open here.
            SnapshotUnsupported: the files are in memory (`read_only`).
            ContainerFailed: the engine refuses.

        """
        environment = self.get(environment_id)
        if self._options.read_only:
            raise SnapshotUnsupported("environments whose work folder is in memory have no snapshots")
        return environment.snapshot(SNAPSHOTS, secrets.token_hex(8), self._node)

    def close_environment(self, environment_id: str) -> None:
        """Close an environment, also one that is still being opened; see the base class."""
        with self._lock:
            known = self._environments.get(environment_id)
        if known is not None and known.exception() is None:
            known.result().close()

    def environments(self) -> tuple[ContainerEnvironment, ...]:
        """Return the open environments, in the order of their opening."""
        with self._lock:
            known = list(self._environments.values())
        return tuple(each.result() for each in known if each.done() and each.exception() is None)

    def _forget(self, environment_id: str) -> None:
        with self._lock:
            self._environments.pop(environment_id, None)

    def close(self) -> None:
        """Close every environment; see the base class.

        Raises:
            ProcessesLeft: something could not be ended or removed; the rest is.

        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            known = list(self._environments.values())
        # Who waits in line for a place to start in is refused; who starts already comes to be closed.
        self._pool.refuse()
        living = [each.result() for each in known if each.exception() is None]
        # All are told first, so that their grace periods run at the same time.
        for environment in living:
            environment.hang_up()
        last = (self._pool.close, self._watch.close, self._drain.close, self._close_network, self._remove_snapshots)
        problems: list[str] = []
        for close in (*(environment.close for environment in living), *last):
            try:
                close()
            except (SandboxError, OSError) as error:
                problems.append(str(error))
        self._engine.close()
        os.close(self._base_lock)
        if problems:
            raise ProcessesLeft("; ".join(problems))

    def _close_network(self) -> None:
        if self._network is not None:
            self._network.close()

    def _remove_snapshots(self) -> None:
        self._engine.remove_snapshots(self._node)
