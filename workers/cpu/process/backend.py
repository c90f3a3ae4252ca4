"""The backend of a process session: a supervisor, which owns the processes, and what is done to them from here.

Messages to the supervisor and its answers are in `supervisor.py`. A grant is the affinity of the process tree, and its weight where the
kernel divides cores by weights. `background.py` holds what is in the background: a command that was sent there, and what
commands have left running.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from workers.cpu.abstract import Holding
from workers.cpu.cores import CoreMap
from workers.cpu.errors import SessionUnavailable
from workers.cpu.handover.fork_client import ForkClient, close
from workers.cpu.handover.protocol import End
from workers.cpu.memory.allowance import Allowance
from workers.cpu.ports.network import HostNetwork, Network
from workers.cpu.process import tree
from workers.cpu.process.anchor import Anchor
from workers.cpu.process.background import Background
from workers.cpu.process.groups import Groups, MemoryGroup
from workers.cpu.process.members import Members
from workers.cpu.process.meter import TreeMeter
from workers.cpu.shell.backend import Backend, Backends, Event, Exited, Gone, HungUp, Refused, Spawned
from workers.cpu.shell.dialect import Dialect, ProtocolFolder

MESSAGE_BYTES = 1 << 16
ANSWER_S = 5.0
"""How long a supervisor may take to say which shell it has."""
KILLED = 128 + signal.SIGKILL


@dataclass(frozen=True, slots=True)
class Told(Spawned):
    """The shell that there is, or how the last one has `exited`, as a worker was told that adopts the session."""

    exited: Exited | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellSetup:
    """What every shell of an environment is started with."""

    environment: str
    dialect: Dialect
    home: str
    variables: Mapping[str, str]
    limits: Mapping[str, int]
    background: Background
    groups: Groups
    memory: MemoryGroup | None = None
    allowance: Allowance | None = None
    anchor: Anchor | None = None


class ProcessBackend(Backend):
    """A connection to the supervisor with the process id `supervisor`, on the machine that `core_map` describes."""

    def __init__(self, channel: socket.socket, supervisor: int, setup: ShellSetup, core_map: CoreMap) -> None:
        self._channel, self._setup, self._core_map = channel, setup, core_map
        self._supervisor = tree.read_process(supervisor)
        self._shell_inside = 0
        self._background, self._in_background, self._weighed = setup.background, False, 1
        self._cores: frozenset[int] = frozenset()
        self._lock = threading.Lock()
        self._members = Members()
        self._ending = self._has_left = self._was_killed = self._has_groups = False
        channel.setblocking(False)

    @property
    def _supervisor_pid(self) -> int:
        return self._supervisor.pid if self._supervisor is not None else 0

    def fileno(self) -> int:
        return self._channel.fileno()

    def spawn(self, control: ProtocolFolder, cwd: str) -> None:
        # What was left behind shares its group with the shell, which would not come up in time.
        self.hold(Holding())
        setup = self._setup
        if self._supervisor is None:
            return  # It has said why, or its end follows.
        control.keep_state()
        try:
            groups = self._joined()
        except OSError as error:
            raise SessionUnavailable(f"cannot start the shell: {error}") from error
        try:
            self._say(
                groups,
                do="spawn",
                argv=setup.dialect.argv(control),
                env=dict(setup.variables),
                cwd=cwd,
                home=setup.home,
                limits=dict(setup.limits),
            )
        finally:
            for descriptor in groups:
                os.close(descriptor)

    def shell_now(self, limit_s: float) -> tuple[int, Exited | None]:
        """Return the process id of the shell, or 0 and how the last one has ended.

        This is asked, not read off the events since: more than one worker may have been killed that has read some.

        Raises `SessionUnavailable` where the supervisor does not say.
        """
        self._say(do="tell")
        poller, deadline = select.poll(), time.monotonic() + limit_s
        poller.register(self._channel, select.POLLIN)
        while (left_s := deadline - time.monotonic()) > 0 and poller.poll(left_s * 1000):
            for event in self.events():
                match event:
                    case Told(pid) if pid < 0:
                        self._say(do="tell")
                    case Told(pid, exited):
                        # The worker before may have left all of it in the background, where a shell saves its state slowly.
                        self._in_background = True
                        self.hold(Holding())
                        return pid, exited
                    case HungUp():
                        raise SessionUnavailable("its supervisor has ended")
        raise SessionUnavailable("its supervisor does not answer")

    def _joined(self) -> list[int]:
        """Return descriptors by which a shell joins the session's control groups. The first one has them made. Raises `OSError`."""
        groups, supervisor = self._setup.groups, self._supervisor_pid
        if not self._has_groups:
            self._has_groups = True
            groups.make(supervisor)
        return [os.open(f"{folder}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC) for folder in groups.joined(supervisor)]

    def begin(self, holding: Holding) -> None:
        # Where `park` found this shell alone, nothing has started since, and no walk is needed.
        before = [process for process in self._members.settled()[0] if process.pid != self._members.shell] if self._has_left else []
        self.spared = frozenset(process.identity for process in before)
        if before or self._in_background or holding.background:
            self.hold(holding)
        else:
            self._hold_shell(self._core_map.real(holding.cores))

    def _hold_shell(self, cores: frozenset[int]) -> None:
        """Apply a grant where only the shell is there. It waits, has one thread and starts nothing, so no walk is needed."""
        with self._lock, contextlib.suppress(ProcessLookupError):
            self._weigh(len(cores) or 1)
            self._cores = cores
            if cores:
                os.sched_setaffinity(self._members.shell, cores)

    def hold(self, holding: Holding) -> None:
        cores = self._core_map.real(holding.cores)
        with self._lock:
            if holding.background and self._ending:
                # They are in the foreground, to die: see `hang_up`.
                return
            if holding.background:
                self._background.send(self._members)
            elif self._in_background:
                self._background.recall(self._members, cores or self._core_map.available)
                self._weighed = 1
            elif cores:
                self._background.pin(self._members, cores)
            self._in_background, self._cores = holding.background, cores
            if not holding.background:
                self._weigh(len(cores) or 1)

    def _weigh(self, cores: int) -> None:
        if cores != self._weighed:
            self._background.weigh(self._members, cores)
            self._weighed = cores

    def park(self) -> None:
        self._has_left = self._background.has_others(self._members)
        self.hold(Holding(background=self._has_left))

    def lend(self, holding: Holding) -> None:
        """Bring what was parked to the foreground; a shell that is alone in its session needs nothing. See the base class."""
        if self._has_left:
            self.hold(holding)

    def follow(self, found: Iterable[tree.Process]) -> None:
        """Put right those of `found` processes that are not where the others are."""
        with self._lock:
            if not self._ending:
                self._background.follow(found, self._cores, background=self._in_background)

    def meter(self) -> TreeMeter:
        return TreeMeter(self._members, self.spared, self.follow, self._setup.memory)

    def kill(self, grace_s: float) -> None:
        """Ask that all processes end but those that were there before, and their descendants; the answer is `Gone`."""
        spared = [(tree.inner_pid(pid), start) for pid, start in self.spared]
        self._say(do="kill", spared=spared, grace_s=grace_s)

    def command_processes(self) -> list[tree.Process]:
        return self._members.settled(self.spared)[0]

    def runs_something(self) -> bool:
        return self._members.has_others()

    def network(self) -> Network | None:
        members = self._members
        if not members.supervisor:
            return None
        return self._setup.anchor or HostNetwork(lambda: [process.pid for process in members.settled()[0]])

    def folder(self) -> str | None:
        try:
            return os.readlink(f"/proc/{self._members.shell}/cwd")
        except OSError:
            return None

    def _say(self, descriptors: Sequence[int] = (), **message: object) -> None:
        self._signal_supervisor(signal.SIGCONT)
        try:
            socket.send_fds(self._channel, [json.dumps(message).encode()], descriptors)
        except (ConnectionError, BrokenPipeError):
            return  # The end of the channel follows as an event.

    def _signal_supervisor(self, number: int) -> None:
        """Signal the supervisor. With SIGCONT it goes on where a command or somebody else has stopped it."""
        if self._supervisor is not None:
            tree.send(self._supervisor, number)

    def abandon(self) -> bool:
        """Kill the supervisor. The fork server then ends what that held, and closes its socket; see the base class."""
        self._signal_supervisor(signal.SIGKILL)
        return True

    def events(self) -> Iterator[Event]:
        while True:
            try:
                message = self._channel.recv(MESSAGE_BYTES)
            except BlockingIOError:
                return
            except ConnectionError:
                message = b""
            if not message:
                if self._was_killed and self._setup.anchor is not None and self._members.shell:
                    # Whatever is inside can end its supervisor, and all else with it: that is the command's doing.
                    yield Exited(self._members.shell, KILLED)
                yield HungUp("the session's supervisor process was killed")
                return
            said = json.loads(message)
            if isinstance(said, int):
                continue  # Its process id, which the worker before this one was killed before it read.
            if said["event"] == "killed":
                self._was_killed = True
                # What the supervisor has left is about to be killed, for which it needs time.
                self.hold(Holding())
            else:
                yield self._parse(said)

    def _parse(self, said: dict[str, object]) -> Event:
        supervisor = self._supervisor_pid
        match said:
            case {"event": "spawned" | "told" as event, "pid": int(inside), **last}:
                # One that has ended already has no id here any more.
                shell = next((pid for pid in tree.children(supervisor, 1) if tree.inner_pid(pid) == inside), -inside)
                self._members, self._shell_inside = Members(supervisor, shell), inside
                # The shell before it may have left something as it ended.
                self._has_left = True
                if event == "spawned":
                    return Spawned(shell)
                return Told(shell, Exited(0, **last) if last and not shell else None)  # type: ignore[arg-type]
            case {"event": "refused", "reason": str(reason)}:
                return Refused(reason)
            case {"event": "exited", "pid": int(inside), "code": int(code), "max_rss_mb": float(rss_mb)}:
                return Exited(self._members.shell if inside == self._shell_inside else -inside, code, rss_mb)
            case {"event": "gone", "max_rss_mb": float(rss_mb), "left": list(left)}:
                return Gone(rss_mb, tuple(left))
        raise ValueError(f"no event of a supervisor: {said}")

    def hang_up(self) -> None:
        """Tell the supervisor to end everything below it; nothing goes to the background any more."""
        with self._lock:
            self._ending = True
            if self._in_background:
                # A process without CPU time cannot handle a signal, nor die of one.
                self._background.recall(self._members, self._core_map.available)
        self._signal_supervisor(signal.SIGCONT)
        try:
            self._channel.shutdown(socket.SHUT_WR)
        except OSError:
            return  # It has gone already.

    def has_ended(self, timeout_s: float) -> bool:
        poller = select.poll()
        poller.register(self._channel, 0)
        return bool(poller.poll(timeout_s * 1000))

    def close(self) -> None:
        """Give the descriptor back. The ids of processes may become those of others."""
        self._members, self._has_left = Members(), False
        close(self._channel)
        self._setup.groups.remove_of(self._supervisor_pid)  # a fork server that was killed meanwhile has not


class ProcessBackends(Backends):
    """Supervisors from the sandbox's fork server, for the sessions of one environment."""

    def __init__(self, fork_client: ForkClient, setup: ShellSetup, core_map: CoreMap) -> None:
        self._fork_client, self._setup, self._core_map = fork_client, setup, core_map
        self.allowance = setup.allowance

    def backend(self, control: ProtocolFolder) -> ProcessBackend:
        return ProcessBackend(*self._supervisor(control.name), self._setup, self._core_map)

    def adopt(self, control: ProtocolFolder, end: End | None) -> tuple[ProcessBackend, int, Exited | None] | None:
        if end is None:
            return None
        assert not isinstance(end.channel, int)
        backend = ProcessBackend(end.channel, end.pid, self._setup, self._core_map)
        return backend, *backend.shell_now(ANSWER_S)

    def _supervisor(self, control: str) -> tuple[socket.socket, int]:
        anchor, groups, of = self._setup.anchor, self._setup.groups.prefixes, self._setup.environment
        try:
            return self._fork_client.supervisor(anchor.pids() if anchor is not None else (), groups, of, control)
        except SessionUnavailable:
            if anchor is None or anchor.stands:
                raise
            # What is inside has ended the anchor meanwhile.
            return self._fork_client.supervisor(anchor.pids(), groups, of, control)

    @property
    def keeps(self) -> bool:
        return self._fork_client.keeps

    def keep(self, control: str, descriptors: Mapping[str, int]) -> None:
        self._fork_client.keep(self._setup.environment, control, descriptors)

    def oom_kills(self) -> int:
        memory = self._setup.memory
        return memory.oom_kills() if memory is not None and memory.was_full(0) else 0
