"""An environment made of shell sessions and files, whatever holds the processes.

| state   | meaning                                                      | next                                  |
|---------|--------------------------------------------------------------|---------------------------------------|
| open    | commands and files are taken                                 | `hang_up`, or what holds it is gone   |
| closing | nothing more is taken, everything that runs is being ended   | all has ended, and its room is free   |
| closed  | it is off the books                                          |                                       |
"""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tangram.errors import ActionCancelled
from workers.cpu.abstract import Environment, EnvironmentSpec, ExecRequest, Holding
from workers.cpu.errors import EnvironmentGone, ProcessesLeft, SandboxError
from workers.cpu.files import RegularFiles
from workers.cpu.memory.allowance import Allowance
from workers.cpu.ports.exchange import HttpAnswer, HttpRequest, exchange
from workers.cpu.ports.network import Network, connect
from workers.cpu.ports.wait import Wait
from workers.cpu.shell.backend import Backend
from workers.cpu.shell.execution import ShellExecution
from workers.cpu.shell.grants import Grants
from workers.cpu.shell.session import Session
from workers.cpu.shell.session_setup import SessionSetup

log = logging.getLogger(__name__)


class ShellEnvironment(Environment):
    """Sessions by name, and the closing of all that belongs to them; `forget` takes the environment off its sandbox's books."""

    def __init__(self, spec: EnvironmentSpec, files: RegularFiles, setup: SessionSetup, forget: Callable[[str], None]) -> None:
        self._spec, self._files, self.setup, self._forget = spec, files, setup, forget
        self._lock = threading.Lock()
        self._sessions: dict[str, Session] = {}
        self._unended: list[Session] = []
        self._grants = Grants()
        self._closed = False
        self._closing = threading.Lock()
        self._cleared = False

    @property
    def spec(self) -> EnvironmentSpec:
        return self._spec

    @property
    def allowance(self) -> Allowance | None:
        return self.setup.backends.allowance

    @property
    def is_closed(self) -> bool:
        """Whether it takes nothing more."""
        return self._closed

    @property
    def is_busy(self) -> bool:
        """Whether a command runs in it, or waits, or a server answers a request."""
        with self._lock:
            return self._grants.serves_requests or any(session.is_taken for session in self._sessions.values())

    def start(self, request: ExecRequest) -> ShellExecution:
        with self._lock:
            self._check_open()
            session = self._sessions.get(request.session)
            if session is None:
                session = self._sessions[request.session] = Session(self.setup, request.session)
        return ShellExecution(session, request, self._grants, self._kill_background)

    def resume(self, name: str, session: Session, backend: Backend | None) -> None:
        """Go on with a session that the worker before this one has left, in `backend` if it has one."""
        with self._lock:
            self._sessions[name] = session
        if backend is not None and not session.is_taken:
            self._grants.resume(backend)

    def printed_by(self, action_id: str) -> int | None:
        with self._lock:
            return next((size for session in self._sessions.values() if (size := session.printed_by(action_id)) is not None), None)

    def close_session(self, name: str, *, idle_only: bool = False) -> None:
        with self._lock:
            self._check_open()
            session = self._sessions.get(name)
            if session is None or (idle_only and session.runs_something):
                return
            del self._sessions[name]
            self._unended.append(session)
            self.setup.record.forget(name)
        with self._closing:
            if self._cleared:  # the end of the environment was faster, and has ended this session, too
                return
            session.close()
            session.remove_files()
        with self._lock:
            self._unended.remove(session)

    def _kill_background(self, asking: Session) -> None:
        """End what commands left running, and forget what they set in the session that is `asking`, whose queue it heads.

        Other sessions keep what is running now.
        """
        with self._lock:
            sessions = [session for session in self._sessions.values() if session is not asking]
        asking.sweep()
        asking.forget_state()
        for session in sessions:
            session.sweep_if_free()

    def read_file(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        with self._or_gone():
            return self._files.read(path, offset, length)

    def write_file(self, path: str, data: bytes, mode: int | None = None, offset: int = 0) -> None:
        with self._or_gone():
            self._files.write(path, data, mode, offset)

    def request(self, asked: HttpRequest, holding: Holding, wait: Wait) -> HttpAnswer:
        with self._or_gone():
            try:
                with self._grants.for_request(holding), connect(self._networks(), asked.port, wait) as connection:
                    return exchange(connection, asked, wait)
            except SandboxError as error:
                if self._closed and not self.setup.backends.loss():
                    raise ActionCancelled("the environment was closed", "environment_closed") from error
                raise

    def _networks(self) -> list[Network]:
        with self._lock:
            sessions = list(self._sessions.values())
        return [network for session in sessions if (network := session.network()) is not None]

    def _check_open(self) -> None:
        if self._closed:
            if loss := self.setup.backends.loss():
                raise EnvironmentGone(f"environment {self._spec.id} is lost: {loss}", self.setup.backends.loss_cause())
            raise EnvironmentGone(f"environment {self._spec.id} is closed")

    @contextmanager
    def _or_gone(self) -> Iterator[None]:
        """Raise `EnvironmentGone` where what is done in the environment fails because that has ended by itself."""
        self._check_open()
        try:
            yield
        except SandboxError as error:
            if loss := self.setup.backends.loss():
                raise EnvironmentGone(f"environment {self._spec.id} is lost: {loss}", self.setup.backends.loss_cause()) from error
            raise

    def drop_record(self) -> None:
        """Have no successor of this worker go on with the environment."""
        self.setup.record.drop()

    def keep_sessions(self) -> None:
        """Have commands that run outlive this worker, once more. Raises `OSError`."""
        for session in list(self._sessions.values()):
            session.keep()

    def hang_up(self) -> None:
        """Begin to close: refuse commands, and tell every session to end. Returns at once."""
        with self._lock:
            self._closed = True
            self.drop_record()
            sessions = [*self._sessions.values(), *self._unended]
        if self.allowance is not None:
            self.allowance.close()
        for session in sessions:
            session.hang_up()

    def close(self) -> None:
        """End every process and remove every file; see the base class.

        Raises `ProcessesLeft` when a process could not be ended; the files are gone all the same.
        """
        self.hang_up()
        with self._closing:
            if self._cleared:
                return
            self._cleared = True
            try:
                self._end_sessions()
            finally:
                try:
                    self._remove()
                finally:
                    self._forget(self._spec.id)

    def _end_sessions(self) -> None:
        left = 0
        for session in (*self._sessions.values(), *self._unended):
            try:
                session.close()
            except (SandboxError, OSError) as error:
                log.warning("a session of environment %s could not be ended: %s", self._spec.id, error)
                left += 1
        if left:
            raise ProcessesLeft(f"environment {self._spec.id}: the processes of {left} sessions could not be ended")

    @abstractmethod
    def _remove(self) -> None:
        """Remove everything that is left of the environment once its sessions have ended. What cannot be is left to `Leftovers`."""
