"""The backend of a container session: a control group for its processes, and a shell that the engine has started in it.

| of the shell | by                                                                                          |
|--------------|---------------------------------------------------------------------------------------------|
| start        | the engine's exec, once a shell: so it has the container's user, filters and capabilities   |
| group        | it waits on a FIFO of its own until the worker has put it into the session's group. The     |
|              | FIFO is there until its first command. The next worker ends a shell whose FIFO is there     |
| end          | a descriptor of the process, readable once it has ended; the code is the engine's           |
| next worker  | the file `shell` says which process it is, and the engine's id for it                       |

Everything that a session starts is in its group, however it forks and whoever its parent is. So a kill stops the whole
group first, and nothing can slip away between two signals.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import select
import shlex
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping

from workers.cpu.abstract import Holding
from workers.cpu.cores import CoreMap
from workers.cpu.docker.cgroups.abstract import SessionGroup
from workers.cpu.docker.container import Container
from workers.cpu.docker.init import WORK
from workers.cpu.docker.meter import GroupMeter
from workers.cpu.docker.network import ContainerNetwork
from workers.cpu.errors import ContainerFailed, SandboxError, SessionUnavailable
from workers.cpu.handover.fork_client import ForkClient
from workers.cpu.handover.protocol import End
from workers.cpu.ports.network import Network
from workers.cpu.process import tree
from workers.cpu.shell.backend import Backend, Backends, Event, Exited, Gone, HungUp, Refused, Spawned
from workers.cpu.shell.dialect import READ_BY_SHELL, ProtocolFolder, make_fifo

START, LAUNCH, SHELL = "start.", "launch", "shell"
log = logging.getLogger(__name__)

KILL_LIMIT_S, CLOSE_GRACE_S, CODE_LIMIT_S, PAUSE_S = 10.0, 0.2, 1.0, 0.003
SIGKILL_CODE = 128 + signal.SIGKILL


class _EndedAtOnce(ContainerFailed):
    """Raised when a shell has been ended before it could be put into its group."""


def group_of(control: str) -> str:
    """Return what the control group of a session is called, by the name of its protocol folder."""
    return f"session-{control}"


class ContainerBackend(Backend):
    """One session of a container, with the protocol folder `control`; `forget` is called once nothing of it is to outlive the worker."""

    def __init__(self, container: Container, control: ProtocolFolder, core_map: CoreMap, forget: Callable[[], None]) -> None:
        if container.has_ended():
            raise SessionUnavailable("the container has ended")
        self._container, self._control, self._core_map, self._forget = container, control, core_map, forget
        self._note = f"{control.folder}/{SHELL}"
        self._group: SessionGroup | None = None
        self._lock = threading.Lock()
        self._events: deque[Event] = deque()
        self._waking = threading.Lock()
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._watched = select.epoll()
        self._watched.register(self._wakeup, select.EPOLLIN)
        self._watched.register(container.ended, select.EPOLLIN)
        self._shell, self._shell_fd, self._started = 0, -1, ""
        self._go = -1
        self._over = threading.Event()
        self._ending = False

    def fileno(self) -> int:
        return self._watched.fileno()

    # -- the shell -----------------------------------------------------------------------------------------------

    def spawn(self, control: ProtocolFolder, cwd: str) -> None:
        try:
            self._let_go()
            if self._group is None:
                self._group = self._container.group.session(group_of(control.name))
            start = self._prepare(control, cwd)
            # Until the first command its start is on nobody's account. With a parked session's time it could take seconds.
            self._group.grant(())
            argv = ["/bin/sh", f"{control.inside}/{LAUNCH}", os.path.basename(start)]
            self._started, self._shell = self._container.engine.run(self._container.id, argv)
            self._take_in(start)
        except _EndedAtOnce:
            self._put(Spawned(self._shell))
            self._put(Exited(self._shell, SIGKILL_CODE))
        except (SandboxError, OSError) as error:
            self._put(Refused(f"the shell could not be started: {error}"))

    def adopt(self) -> Exited | int:
        """Take over the group and the shell of an earlier worker. Return the shell's process id, or how it has ended.

        A shell in which no command has begun is ended: it may still wait to be let go on. Raises `FileNotFoundError` where no shell was
        noted.
        """
        pid: int
        with open(self._note) as file:
            pid, start, self._started = json.load(file)
        # A shell that the engine has been asked for may start later. Without its FIFO it ends at once.
        is_unused = self._control.remove(START)
        self._group = self._container.group.session(group_of(self._control.name))
        self._group.thaw()
        # One after the other, so that each value is written: the earlier worker may have left any.
        self._group.send_to_background()
        self._group.grant(())
        shell = tree.read_process(pid)
        if shell is not None and shell.identity == (pid, start):
            if is_unused:
                tree.send(shell, signal.SIGKILL)
            elif pid in self._group.processes():
                with contextlib.suppress(_EndedAtOnce):
                    self._watch(pid)
                    return pid
        return Exited(0, self._code())

    def _watch(self, shell: int) -> None:
        self._shell, self._shell_fd = shell, _handle(shell)
        self._watched.register(self._shell_fd, select.EPOLLIN)

    def _prepare(self, control: ProtocolFolder, cwd: str) -> str:
        """Write what the shell starts with; return the FIFO on which it waits."""
        control.remove(START)
        start, launch = f"{control.folder}/{START}{secrets.token_hex(8)}", f"{control.folder}/{LAUNCH}"
        make_fifo(start, READ_BY_SHELL)
        control.keep_state()
        argv = " ".join(map(shlex.quote, self._container.dialect.argv(control)))
        lines = (
            f'read -r line <{control.inside}/"$1" || exit',  # its worker has ended, or knows nothing of it
            f"cd {shlex.quote(cwd)} 2>/dev/null || cd {WORK} || cd /",
            f"SHELL={shlex.quote(self._container.dialect.program)} exec {argv} </dev/null >/dev/null 2>&1",
        )
        control.write(launch, ("\n".join(lines) + "\n").encode("utf-8", "surrogateescape"))
        return start

    def _take_in(self, start: str) -> None:
        """Put the waiting shell into the group, then let it go on."""
        assert self._group is not None
        if (shell := tree.read_process(self._shell)) is None:
            raise _EndedAtOnce
        # First, so that no shell is in the group of which the next worker would not know.
        self._control.write(self._note, json.dumps([*shell.identity, self._started]).encode())
        go = os.open(start, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            self._watch(self._shell)
            self._group.take_in(self._shell)
            os.write(go, b"go\n")
            self._put(Spawned(self._shell))
        except BaseException:
            os.close(go)
            raise
        # It must stay open until the shell has read its line, which the shell's first report says.
        self._go = go

    def _let_go(self) -> None:
        """Close and remove the FIFO by which a shell was let go on."""
        if self._go >= 0:
            self._control.remove(START)  # first: it is tried again where it cannot be removed, by a descriptor that is still ours
            os.close(self._go)
        self._go = -1

    def command_processes(self) -> list[tree.Process]:
        return self._living(self.spared)

    def runs_something(self) -> bool:
        return self._group is not None and any(process.pid != self._shell for process in self._living())

    def network(self) -> Network:
        return ContainerNetwork(self._container)

    def folder(self) -> str | None:
        try:
            return os.readlink(f"/proc/{self._shell}/cwd")
        except OSError:
            return None

    # -- events --------------------------------------------------------------------------------------------------

    def _put(self, event: Event) -> None:
        self._events.append(event)
        self._wake()

    def _wake(self) -> None:
        """Make `fileno` readable, unless all is closed: the number of a closed descriptor may be another file's by now."""
        with self._waking:
            if self._wakeup >= 0:
                os.eventfd_write(self._wakeup, 1)

    def events(self) -> Iterator[Event]:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wakeup)
        while self._events:
            yield self._events.popleft()
        if self._shell_fd >= 0 and _is_readable(self._shell_fd) and not self._container.is_ending():
            code = self._shell_ended()
            # The engine may have taken its time, and the kernel may have ended the container meanwhile.
            if not self._container.is_ending():
                yield Exited(self._shell, code)
        if self._container.has_ended() or self._over.is_set():
            yield HungUp()

    def _shell_ended(self) -> int:
        self._watched.unregister(self._shell_fd)
        os.close(self._shell_fd)
        self._shell_fd = -1
        return self._code()

    def _code(self) -> int:
        """Return the code with which the shell has ended."""
        deadline = time.monotonic() + CODE_LIMIT_S
        # The engine hears of it a moment later than the kernel tells us.
        while (code := self._container.engine.exit_code(self._started)) is None and time.monotonic() < deadline:
            time.sleep(PAUSE_S)
        return SIGKILL_CODE if code is None else code

    # -- grants --------------------------------------------------------------------------------------------------

    def begin(self, holding: Holding) -> None:
        self._let_go()
        assert self._group is not None, "a shell was started"
        self.spared = frozenset(process.identity for process in self._living() if process.pid != self._shell)
        self.hold(holding)

    def hold(self, holding: Holding) -> None:
        assert self._group is not None, "a shell was started"
        with self._lock, contextlib.suppress(FileNotFoundError):
            if not holding.background:
                self._group.grant(self._core_map.real(holding.cores))
            elif not self._ending:
                self._group.send_to_background()

    def park(self) -> None:
        with self._lock, contextlib.suppress(FileNotFoundError):
            if self._group is not None and not self._ending:
                self._group.park()
        self._container.reap()

    def lend(self, holding: Holding) -> None:
        with self._lock, contextlib.suppress(FileNotFoundError):
            if self._group is not None and not self._ending:
                self._group.lend(self._core_map.real(holding.cores))

    def meter(self) -> GroupMeter:
        assert self._group is not None, "a shell was started"
        return GroupMeter(self._container, self._group)

    # -- the end -------------------------------------------------------------------------------------------------

    def kill(self, grace_s: float) -> None:
        """End what was not there when the command began; the answer is `Gone`."""

        def work() -> None:
            left: list[int] = []
            try:
                left = self._end(self.spared, grace_s)
                self._container.reap()
                self._container.enforce_disk_limit()
            except (SandboxError, OSError) as error:
                log.warning("a command's processes could not all be ended: %s", error)
                left = [process.pid for process in self._living(self.spared)]
            finally:
                self._put(Gone(left=tuple(left)))

        threading.Thread(target=work, name="tangram-kill", daemon=True).start()

    def hang_up(self) -> None:
        with self._lock:
            if self._ending:
                return
            self._ending = True

        def work() -> None:
            try:
                left = self._end(frozenset(), CLOSE_GRACE_S)
                # What has ended counts against the container's bound on processes until it is collected.
                self._container.reap()
                if not left:
                    self._over.set()
            except (SandboxError, OSError) as error:
                log.warning("a session's processes could not all be ended: %s", error)
            finally:
                self._wake()

        threading.Thread(target=work, name="tangram-hang-up", daemon=True).start()

    def _end(self, spared: frozenset[tree.Identity], grace_s: float) -> list[int]:
        """End the processes of the group but `spared` ones: by SIGTERM, then by SIGKILL with all stopped; return what is left."""
        if self._group is None:
            return []
        began = time.monotonic()
        try:
            self.hold(Holding())  # A process without CPU quota cannot handle SIGTERM.
        except (SandboxError, OSError) as error:
            log.warning("processes that are to end have no time to: %s", error)
        for process in self._living(spared) if grace_s > 0 else ():
            tree.send(process, signal.SIGTERM)
            tree.send(process, signal.SIGCONT)
        while living := self._living(spared):
            age_s = time.monotonic() - began
            if age_s > KILL_LIMIT_S:
                return [process.pid for process in living]
            if age_s >= grace_s:
                self._kill_stopped(spared)
            time.sleep(PAUSE_S)
        return []

    def _kill_stopped(self, spared: frozenset[tree.Identity]) -> None:
        assert self._group is not None
        with contextlib.suppress(FileNotFoundError):
            self._group.freeze()
            try:
                for process in self._living(spared):
                    tree.send(process, signal.SIGKILL)
            finally:
                self._group.thaw()

    def _living(self, spared: frozenset[tree.Identity] = frozenset()) -> list[tree.Process]:
        """Return the group's living processes, without `spared` ones and their descendants."""
        assert self._group is not None
        found = {pid: process for pid in self._group.processes() if (process := tree.read_process(pid)) is not None}

        def is_spared(process: tree.Process | None) -> bool:
            while process is not None:
                if process.identity in spared:
                    return True
                process = found.get(process.parent)
            return False

        return [process for process in found.values() if tree.is_alive(process) and not (spared and is_spared(process))]

    def has_ended(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not self._over.wait(0.01):
            if self._container.has_ended():
                return True
            if time.monotonic() > deadline:
                return False
        return True

    def close(self) -> None:
        """Give descriptors and the group back."""
        self._watched.close()
        self._let_go()
        with self._waking:
            for descriptor in (self._wakeup, self._shell_fd):
                if descriptor >= 0:
                    os.close(descriptor)
            self._wakeup = self._shell_fd = -1
        if self._group is not None:
            # The engine removes what is still in use, with the container.
            with contextlib.suppress(OSError):
                self._group.remove()
        self._forget()


class ContainerBackends(Backends):
    """Backends of one container's sessions, in the environment `environment`, of which `fork_client` keeps what outlives the worker."""

    def __init__(self, container: Container, core_map: CoreMap, environment: str, fork_client: ForkClient) -> None:
        self._container, self._core_map, self._environment, self._fork_client = container, core_map, environment, fork_client
        self.allowance = container.allowance

    def backend(self, control: ProtocolFolder) -> ContainerBackend:
        return ContainerBackend(self._container, control, self._core_map, lambda: self.keep(control.name, {}))

    def adopt(self, control: ProtocolFolder, end: End | None) -> tuple[ContainerBackend, int, Exited | None] | None:
        backend = self.backend(control)
        try:
            found = backend.adopt()
        except BaseException as error:
            backend.close()
            if isinstance(error, FileNotFoundError | ValueError):  # Its worker had not written the note: the shell was in no group yet.
                return None
            raise
        return (backend, found, None) if isinstance(found, int) else (backend, 0, found)

    @property
    def keeps(self) -> bool:
        return self._fork_client.keeps

    def keep(self, control: str, descriptors: Mapping[str, int]) -> None:
        self._fork_client.keep(self._environment, control, descriptors, in_container=True)

    def oom_kills(self) -> int:
        try:
            return self._container.group.oom_kills()
        except OSError:  # The container has ended, which `loss` explains.
            return 0

    def loss(self) -> str:
        return self._container.loss()

    def loss_cause(self) -> str:
        return self._container.loss_cause


def _handle(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise _EndedAtOnce from None


def _is_readable(descriptor: int) -> bool:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(0))
