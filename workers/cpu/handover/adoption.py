"""A worker goes on with the environments that the worker before it has left; `protocol.py` says how they outlived that.

| an environment                                               | is                             |
|--------------------------------------------------------------|--------------------------------|
| has a record, and was set up as this worker would set it up  | adopted: files, sessions with their variables, what they left running |
| has no record, or is of another kind                         | ended, and its files removed   |

| a command in an adopted environment                          | is                             |
|--------------------------------------------------------------|--------------------------------|
| has a message in the memory of its session                   | gone on with: it runs, or its end is to be told |
| has none, as one with a terminal                             | ended; what earlier commands have left is spared |
| was about to be told to the shell                            | told now                       |
| has ended, and its end has been told                         | over                           |

A shell that waits holds its FIFO `go` open. If the supervisor of a session has ended meanwhile, the session gets another one, as always:
its next shell has what was exported, and begins in the same folder. Sessions of containers have no supervisor: their shells are found by
what the worker before has noted of them (`docker/backend.py`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from workers.cpu.abstract import Holding, Loss
from workers.cpu.base import remove_tree
from workers.cpu.errors import SandboxError, SessionUnavailable
from workers.cpu.handover.fork_client import ForkClient, close
from workers.cpu.handover.protocol import STREAMS, End, Kept
from workers.cpu.process import tree
from workers.cpu.process.isolation import Folders
from workers.cpu.shell.backend import Backend, Exited, Gone, HungUp
from workers.cpu.shell.environment import ShellEnvironment
from workers.cpu.shell.left_run import LeftRun, Shell
from workers.cpu.shell.output import Drain
from workers.cpu.shell.record import Record
from workers.cpu.shell.run import GRACE_S
from workers.cpu.shell.run_memory import NAMES, RunMemory, is_over
from workers.cpu.shell.session import Session

log = logging.getLogger(__name__)

END_S = 15.0
"""Longest wait, seconds: for what is to end, and, for all of them together, for busy shells whose sessions have lost their memory."""
PAUSE_S = 0.005

KEPT = {"done", *STREAMS, *NAMES}
"""What must be kept of a session so that a command in it can be gone on with."""

E = TypeVar("E", bound=ShellEnvironment)


class Adoption(Generic[E]):
    """What is left in the folder `environments`, and `kept` by the fork server.

    `ways` are those in which environments may be set up, first that of this worker. `note_loss` is told of each that is not adopted.
    """

    def __init__(
        self,
        environments: Path,
        kept: Kept,
        ways: Sequence[Mapping[str, Any]],
        drain: Drain,
        fork_client: ForkClient,
        note_loss: Callable[[Loss], object],
    ) -> None:
        self._environments, self._server, self._ways, self._drain = environments, kept.server, ways, drain
        self._fork_client, self._note_loss = fork_client, note_loss
        self._ends: dict[str, list[End]] = {}
        for end in kept.ends:
            self._ends.setdefault(end.environment, []).append(end)
        self._idle_until = time.monotonic() + END_S
        self._closes: list[Callable[[], object]] = []
        """What gives back what was made of the sessions of the environment that is being adopted."""
        self.messages: list[str] = []
        """The messages of the commands that go on."""

    def adopt(self, make: Callable[[Record, Folders, list[End]], E]) -> list[E]:
        """Return the environments that go on, in the order of their opening; what else is left is ended.

        `make` returns the object of one that stands, by what is kept of it, without its sessions. It raises `SandboxError` or `OSError`.
        """
        records, adopted, given_up = self._records(), [], []
        for record in records:
            name, self._closes = record.spec.id, []
            try:
                adopted.append(self._adopt(record, make))
            except (SandboxError, OSError, ValueError, LookupError) as error:  # The last two: what was left makes no sense.
                log.warning("environment %s of the worker before this one is ended: %s", name, error)
                self._note_loss(Loss(name, str(error)))
                given_up += self._closes
            else:
                del self._ends[name]
        self._end_all([end for ends in self._ends.values() for end in ends])
        for give_back in given_up:
            with contextlib.suppress(SandboxError, OSError):  # an engine that fails holds up no other environment
                give_back()
        kept = {environment.spec.id for environment in adopted}
        for folder in [one for one in self._environments.iterdir() if one.name not in kept]:
            remove_tree(folder)
        if kept:
            log.warning("%d environments of the worker before this one go on: %s", len(kept), ", ".join(sorted(kept)))
        return adopted

    def _records(self) -> list[Record]:
        found = []
        for folder in self._environments.iterdir():
            try:
                record = Record.read(Folders(str(folder)).record)
            except (OSError, ValueError) as error:
                log.warning("what the worker before this one left in %s is removed: %s", folder, error)
                if not isinstance(error, FileNotFoundError):  # an environment that was being opened or closed has none
                    self._note_loss(Loss(folder.name, str(error)))
                continue
            if record.spec.id == folder.name:
                found.append(record)
                self._ends.setdefault(folder.name, [])
        return sorted(found, key=lambda record: record.opened_at)

    def _adopt(self, record: Record, make: Callable[[Record, Folders, list[End]], E]) -> E:
        if record.made not in self._ways:
            own = self._ways[0]
            names = sorted(name for name in {**record.made, **own} if record.made.get(name) != own.get(name))
            raise SessionUnavailable(f"this worker would set it up in another way: {', '.join(names)}")
        messages: list[str] = []
        ends, control_of = self._ends[record.spec.id], {session.control: name for name, session in record.sessions.items()}
        environment = make(record, Folders(f"{self._environments}/{record.spec.id}"), ends)
        backends = {control_of[end.control]: end for end in ends if end.control in control_of and not end.name}
        for name, known in record.sessions.items():
            session = Session(environment.setup, name, known)
            kept = {end.name: end.channel for end in ends if end.name and end.control == known.control}
            memory = RunMemory({each: os.dup(kept[each]) for each in NAMES}) if kept.keys() >= KEPT else None  # type: ignore[arg-type]
            self._closes += [memory.close] if memory is not None else []
            left = memory.left() if memory is not None else None
            if memory is not None and left is not None:
                with contextlib.suppress(BlockingIOError):  # nothing was reported since its worker was killed
                    left["report"] = memory.take_report(kept["done"], left["report"])  # type: ignore[arg-type]
            backend, shell, exited = self._backend(environment, session, backends.get(name), memory, left)
            run = None
            if left is not None and left["message"]:
                awaits_run = shell > 0 and session.control.awaits_run()
                run = LeftRun(Shell(backend, shell) if backend is not None else None, left, exited, awaits_run)
                messages.append(left["message"])
            session.resume(backend, shell, memory, run)
            environment.resume(name, session, backend)
        for end in [one for one in ends if isinstance(one.channel, int)]:
            if end.name:
                end.close()
            else:
                os.set_blocking(end.fileno(), False)
                self._drain.adopt(end.fileno())
        # The worker was closing these sessions.
        self._end_all([end for end in ends if end.control not in (*control_of, "") and end.name in ("", *KEPT)])
        self.messages += messages
        return environment

    def _backend(
        self, environment: E, session: Session, end: End | None, memory: RunMemory | None, left: Mapping[str, Any] | None
    ) -> tuple[Backend | None, int, Exited | None]:
        """Return the backend of a session, and its shell, or how that has ended.

        A shell is busy without a command while it starts, or saves what its last command has left. Nobody needs to wait for that: its
        next run waits in its FIFO. Raises `SessionUnavailable` where a command runs that cannot be gone on with and does not end.
        """
        if (found := environment.setup.backends.adopt(session.control, end)) is None:
            return None, 0, None
        backend, shell, exited = found
        self._closes.append(backend.close)
        if left is not None and not left["message"] and not is_over(left) and shell and not session.control.awaits_run():
            log.warning("a command of environment %s is ended: it cannot go on without its worker", environment.spec.id)
            with environment.setup.backends.awake():
                _end_command(backend, left)
            return backend, 0, exited
        while shell and memory is None and not session.control.awaits_run():
            if time.monotonic() > self._idle_until:
                raise SessionUnavailable("its shell is busy, and the memory is lost that says with what")
            time.sleep(PAUSE_S)
        return backend, shell, exited

    def _end_all(self, ends: list[End]) -> None:
        """End what is at the other ends, children of the fork server, and return once nothing of it is left."""
        for end in ends:
            if isinstance(end.channel, int):
                # The copy of the fork server, which has nobody at the other end where it is of a container.
                self._fork_client.keep("", end.control, {}, in_container=True)
                continue
            with contextlib.suppress(OSError):
                end.channel.shutdown(socket.SHUT_WR)
            # A command may have stopped its supervisor.
            _send(end.pid, self._server, signal.SIGCONT)
        for number in (signal.SIGKILL, None):
            deadline, left = time.monotonic() + END_S, [end for end in ends if not isinstance(end.channel, int)]
            for end in left:
                poller = select.poll()
                poller.register(end.channel, 0)
                if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000) and number is not None:
                    _send(end.pid, self._server, number)
        for end in ends:
            end.close() if isinstance(end.channel, int) else close(end.channel)


def _end_command(backend: Backend, state: Mapping[str, Any]) -> None:
    """End a command, and spare what others have left. Raises `SessionUnavailable` where it does not end."""
    backend.resume(Holding(), [(int(pid), int(start)) for pid, start in state["spared"]])
    backend.kill(GRACE_S)
    poller, deadline = select.poll(), time.monotonic() + END_S
    poller.register(backend.fileno(), select.POLLIN)
    while (left_s := deadline - time.monotonic()) > 0 and poller.poll(left_s * 1000):
        for event in backend.events():
            match event:
                case Gone():
                    return
                case HungUp():
                    raise SessionUnavailable("its supervisor has ended")
    raise SessionUnavailable("a command in it does not end")


def _send(pid: int, parent: int, number: int) -> None:
    process = tree.read_process(pid)
    if process is not None and process.parent == parent:
        tree.send(process, number)
