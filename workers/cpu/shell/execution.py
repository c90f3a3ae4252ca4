"""One command carried out in a shell session.

| phase   | meaning                                             | next                                                   |
|---------|-----------------------------------------------------|--------------------------------------------------------|
| waiting | the session is not free, or its shell starts        | shell ready: running; killed or no shell: over         |
| running | the shell evaluates the command                     | reported or shell ended: over; timeout or kill: ending |
| ending  | the backend ends the command's processes            | none is left: over                                     |
| over    | the outcome stands                                  |                                                        |

A timeout or a kill ends the shell too: were only its child killed, the shell would go on with the rest of the command.
Processes that earlier commands left behind are spared. The thread that calls `wait` does the work. Other threads set what
they want under the lock and wake it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Literal

from workers.cpu.abstract import ExecOutcome, ExecRequest, Execution, Given, Holding, Status, Usage
from workers.cpu.errors import MemoryFull, NotReady, SandboxError, SessionUnavailable
from workers.cpu.process.tree import Identity
from workers.cpu.shell.backend import Backend, Meter
from workers.cpu.shell.dialect import REFUSALS
from workers.cpu.shell.grants import Grants
from workers.cpu.shell.left_run import LeftRun, Shell
from workers.cpu.shell.run import KILLED, NEVER, Run
from workers.cpu.shell.run_types import Hooks, NotBegun
from workers.cpu.shell.session import QueueEntry, Session

log = logging.getLogger(__name__)

LEAST_START_S = 10.0
"""Seconds that a shell may take to start, however short the time limit of the command: processes left by earlier ones may slow it."""

Phase = Literal["waiting", "running", "ending", "over"]


class ShellExecution(Execution):
    """A command for `session`. `grants` are those of the environment.

    `kill_background` is called before the command begins, if it asks for a fence.
    """

    def __init__(self, session: Session, request: ExecRequest, grants: Grants, kill_background: Callable[[Session], None]) -> None:
        self._session, self._request, self._grants, self._kill_background = session, request, grants, kill_background
        self._entry = QueueEntry(request.action_id)
        self._waiting = threading.Lock()
        self._outcome: ExecOutcome | None = None
        self._lock = threading.Lock()
        self._phase: Phase = "waiting"
        self._holding = request.holding
        self._killed: str | None = None
        self._given: deque[Given] = deque()
        self._backend: Backend | None = None
        self._meter: Meter | None = None
        self._wake = -1
        self._run_name = ""

    def wait(self) -> ExecOutcome:
        with self._waiting:
            if self._outcome is None:
                self._outcome = self._carry_out()
            return self._outcome

    def resize(self, holding: Holding) -> None:
        with self._lock:
            if self._phase == "running" and self._backend is not None and not self._session.closed:
                self._grants.hold(self._backend, holding)
                if self._meter is not None:
                    self._meter.set_background(holding.background)
            self._holding = holding

    def used(self) -> Usage | None:
        meter = self._meter
        return meter.usage if meter is not None else None

    def give(self, given: Given) -> None:
        with self._lock:
            if self._phase in ("waiting", "running"):
                self._given.append(given)
            if self._phase == "running" and self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def note_told(self) -> None:
        if self._run_name:
            self._session.memory.clear(self._run_name)

    def kill(self, reason: str) -> None:
        with self._lock:
            if self._killed is not None or self._phase == "over":
                return
            self._killed = reason
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)
        self._session.abandon(self._entry)

    def _carry_out(self) -> ExecOutcome:
        try:
            if not self._session.take(self._entry):
                return self._not_run()
            return self._use_session()
        finally:
            self._session.release(self._entry)
            with self._lock:
                self._phase = "over"

    def _use_session(self) -> ExecOutcome:
        wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            with self._lock:
                self._wake = wake
                left = self._session.take_left(self._request.action_id)
                if self._killed is not None and left is None:
                    return self._not_run()
                if self._killed is not None:
                    os.eventfd_write(wake, 1)
            return self._try_shells(wake) if left is None else self._go_on(left)
        except tuple(REFUSALS.values()):
            raise
        except (SandboxError, OSError) as error:
            if not isinstance(error, SandboxError):
                self._session.reset()
            return self._not_run(str(error), MemoryFull.cause if isinstance(error, MemoryFull) else SandboxError.cause)
        finally:
            with self._lock:
                self._wake = -1
            os.close(wake)

    def _go_on(self, left: LeftRun) -> ExecOutcome:
        """Go on with the command, which the worker before this one has left."""
        if left.shell is None:
            return self._not_run("what held the session's processes was killed")
        try:
            return self._run(left.shell, 0.0, left)
        except NotBegun as error:
            return self._not_run(str(error))

    def _try_shells(self, wake: int) -> ExecOutcome:
        """Run the command in the session's shell, or in a fresh one when that ends without having begun it.

        Where earlier commands may be the reason, a last shell starts with nothing left of them, and the time until then is the command's.
        """
        if self._request.fence:
            self._kill_background(self._session)
        began, timeout_s, may_be_theirs = self._unpaused_now(), self._request.timeout_s or NEVER, self._grants.have_begun
        limit_s, spent_s = max(timeout_s, LEAST_START_S) if may_be_theirs else NEVER, 0.0
        last = 3 if may_be_theirs else 2
        for attempt in range(1, last + 1):
            failure: NotBegun | SessionUnavailable
            try:
                shell = self._session.ready_shell(wake, limit_s)
            except SessionUnavailable as error:
                if not may_be_theirs or isinstance(error, MemoryFull) or self._is_over_anyway:
                    raise
                failure = error
            else:
                try:
                    return self._run(shell, spent_s)
                except NotBegun as error:
                    failure = error
            if attempt == last:
                break
            if attempt == 2:
                self._kill_background(self._session)
            elif isinstance(failure, NotReady):
                self._session.forget_state()
            if may_be_theirs:
                spent_s = self._unpaused_now() - began
            if spent_s >= timeout_s:
                return self._not_run(f"ran longer than {timeout_s:g} s: {failure}", "timeout")
        is_theirs = may_be_theirs and isinstance(failure, (NotBegun, NotReady))
        return self._not_run(f"no shell comes to the command: {failure}", "exit" if is_theirs else SandboxError.cause)

    def _unpaused_now(self) -> float:
        """Return the time on a clock that stands while the environment is paused."""
        return time.monotonic() - self._session.setup.backends.paused_s()

    @property
    def _is_over_anyway(self) -> bool:
        return self._killed is not None or self._session.closed or bool(self._session.loss)

    def _run(self, shell: Shell, spent_s: float, left: LeftRun | None = None) -> ExecOutcome:
        self._begin(shell.backend, None if left is None else [(int(pid), int(start)) for pid, start in left.state["spared"]])
        try:
            hooks = Hooks(lambda: self._killed, self._note_ending, self._given)
            with Run(self._session, self._request, shell, hooks, left) as run:
                self._run_name = run.name
                if left is not None:
                    run.resume(left)
                with self._lock:
                    self._meter = run.meter
                    self._meter.set_background(self._holding.background)
                if left is None:
                    run.hand_over(len(self._holding.cores) or self._request.dop, spent_s)
                return run.pump(self._wake)
        finally:
            with self._lock:
                self._phase = "over"
                if self._killed is None:
                    # What the command was given must not interrupt the start of another shell for it.
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake)
            # What the command did stands, whatever becomes of its grant.
            try:
                self._grants.over(shell.backend)
            except (SandboxError, OSError) as error:
                log.warning("a grant could not be taken back: %s", error)

    def _begin(self, backend: Backend, spared: Collection[Identity] | None) -> None:
        """Apply the grant to the session's processes, some of which are `spared` where the command has begun already."""
        with self._lock:
            self._backend, self._phase = backend, "running"
            self._grants.begin(backend, self._holding, spared)

    def _note_ending(self) -> None:
        """Note that the command is being killed: a resize has no effect any more, and it has the time to end."""
        with self._lock:
            self._phase = "ending"
            if self._holding.background and self._backend is not None and self._meter is not None:
                try:
                    self._backend.hold(Holding())
                    self._meter.set_background(False)
                except (SandboxError, OSError) as error:
                    log.warning("a command that is to end has no time to: %s", error)

    def _not_run(self, problem: str = "", cause: str = SandboxError.cause) -> ExecOutcome:
        """Return the outcome of a command that never began, because of `problem` unless a kill, a loss or a close explains it.

        With a cause of the program's own, its exit code is that of a command that was killed.
        """
        statuses: dict[str, Status] = {"timeout": "timed_out", SandboxError.cause: "failed"}
        status, reason, exit_code = statuses.get(cause, "succeeded"), problem, KILLED
        if self._killed is not None:
            status, reason, cause = "cancelled", self._killed, "cancelled"
        elif loss := self._session.loss:
            status, reason, cause = "lost", loss, self._session.loss_cause
        elif self._session.closed:
            status, reason, cause = "cancelled", "the environment was closed", "environment_closed"
        return ExecOutcome(
            status=status,
            exit_code=exit_code if status == "succeeded" else None,
            stdout=b"",
            stderr=b"",
            truncated=False,
            reason=reason,
            execution_s=0.0,
            cpu_s=0.0,
            max_rss_mb=0.0,
            cause=cause,
        )
