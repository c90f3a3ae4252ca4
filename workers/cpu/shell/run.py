"""The loop that serves one command in a shell: output, report, deadlines, kill.

It holds no lock. The descriptor that wakes it is all that it shares with other threads. It ends on the first of: the
shell's report for this run, the end of the shell, the end of a kill, the end of the backend.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import secrets
import select
import time
from dataclasses import astuple
from signal import SIGINT, SIGKILL

from workers.cpu.abstract import Data, ExecOutcome, ExecRequest, Signal, Status
from workers.cpu.errors import MemoryFull, SandboxError
from workers.cpu.pace import Pace
from workers.cpu.shell.backend import Event, Exited, Gone, HungUp, Meter
from workers.cpu.shell.dialect import REFUSALS, refusal
from workers.cpu.shell.interrupt import INTERRUPTED, Interrupt
from workers.cpu.shell.left_run import LeftRun, Shell
from workers.cpu.shell.output import Capture
from workers.cpu.shell.run_types import Ending, Hooks, NotBegun, both_ends, waits_in
from workers.cpu.shell.session import Session
from workers.cpu.shell.streams import CommandStreams
from workers.cpu.shell.terminal import INTERRUPT

GRACE_S, CHECK_S, BEGIN_CHECK_S, HELD_CHECK_S = 0.2, 0.1, 0.005, 0.02
ANSWER_S = 12.0
"""Longest wait for the answer to a kill, seconds. Where processes cannot be killed, a sound backend says so before that."""
LONGEST_REPORT = 64
KILLED = 128 + SIGKILL
"""The exit code of what the kernel has ended."""
_CODE = "[0-9]|[1-9][0-9]|1[0-9][0-9]|2[0-4][0-9]|25[0-5]"
_REPORT = re.compile(f"(?P<run>[0-9a-f]{{16}}) (?:(?P<refusal>{'|'.join(REFUSALS)}) )?(?P<code>{_CODE})\n".encode())
NEVER = float("inf")


class Run:
    """One command from hand-over to outcome."""

    def __init__(self, session: Session, request: ExecRequest, shell: Shell, hooks: Hooks, left: LeftRun | None) -> None:
        self._session, self._request, self._shell = session, request, shell
        self._hooks = hooks
        self.name = secrets.token_hex(8) if left is None else str(left.state["name"])
        self._descriptors = contextlib.ExitStack()
        with self._descriptors:
            # Both ends, so that neither side's opening blocks and no hang-up is seen between two openings.
            self._go = self._descriptors.enter_context(io.FileIO(both_ends(session.control.go), "r+"))
            self._done = both_ends(session.control.done)
            self._descriptors.callback(os.close, self._done)
            self._streams = self._descriptors.enter_context(
                contextlib.closing(CommandStreams(session, request, shell, resumes=left is not None))
            )
            self._descriptors = self._descriptors.pop_all()
        self.meter = shell.backend.meter()
        self.meter.count_pauses(session.setup.backends.allowance)
        self._poller = select.poll()
        self._report = b""
        self._has_begun = False
        self._held_since, self._held_before_s = NEVER, 0.0
        self._interrupt: Interrupt | None = None
        self._ended_by_interrupt = False
        self._kill: tuple[Status, int | None, str, str] | None = None
        self._abandon_at = self._do_without_at = NEVER
        self._ending: Ending | None = None
        self._began = time.monotonic()
        self._printed = self._checked = self._began
        self._spent_s = self._starved_until_printed_s = 0.0
        self._sample_at = self._began + self.meter.next_interval_s()

    def __enter__(self) -> Run:
        Meter.running.add(self.meter)
        return self

    def __exit__(self, *_: object) -> None:
        Meter.running.discard(self.meter)
        self._descriptors.close()

    def hand_over(self, dop: int, spent_s: float) -> None:
        """Give the command, which has spent some of its time, to the shell, with the DoP `dop`."""
        text = self._session.setup.dialect.text(self._request, self._streams.words, self._streams.variables(dop), self._streams.files)
        self._session.control.write_text(text)
        self._began = self._printed = time.monotonic()
        self._spent_s = spent_s
        self._session.memory.begin(
            {
                "name": self.name,
                "action": self._request.action_id,
                "message": self._request.message,
                "began": self._began,
                "spent_s": spent_s,
                "spared": list(self._shell.backend.spared),
                "baseline": self.meter.baseline(),
            }
        )
        self._go.write(f"{self.name}\n".encode())

    def resume(self, left: LeftRun) -> None:
        """Go on with a command of the worker before this one; its clock runs on. Raises `NotBegun`."""
        state = left.state
        self._began = self._printed = float(state["began"])
        self._spent_s, self._has_begun = float(state["spent_s"]), True
        self.meter.resume(state["baseline"], state["figures"])
        self._starved_until_printed_s = self.meter.starved_s
        if ending := state.get("ending"):
            self._ending = Ending(*ending)
            return
        self._report = state["report"]
        if kill := state.get("kill"):
            self._kill = tuple(kill)
        self._read_report()
        if left.exited is not None:
            self._take(left.exited)
        if self._ending is None and self._kill is not None:
            again, self._kill = self._kill, None
            self._end(again[0], again[2], again[3], again[1])
        elif self._ending is None and left.awaits_run and not waits_in(self._go.fileno()):
            # It waited before this looked for a report, which comes before it waits. So it was never told to begin.
            self._go.write(f"{self.name}\n".encode())

    def pump(self, wake: int) -> ExecOutcome:
        """Serve the command until it is over; `wake` becomes readable when `killed` has an answer.

        Raises `NotBegun` when the shell ended before it took this command, by the doing of an earlier one; one of `REFUSALS` when the
        command cannot begin.
        """
        backend = self._shell.backend
        captures = {capture.descriptor: capture for capture in self._streams.captures}
        for descriptor in (wake, self._done, backend.fileno(), *captures):
            self._poller.register(descriptor, select.POLLIN)
        pace = Pace()
        while self._ending is None:
            pace.keep()
            self._serve_input()
            self._hold_back()
            for descriptor, events in self._poller.poll(self._patience_ms()):
                if descriptor in captures:
                    self._pull(captures[descriptor], events)
                elif descriptor == self._done:
                    self._read_report()
                elif descriptor == wake:
                    os.eventfd_read(wake)
                    if (reason := self._hooks.killed()) is not None:
                        self._end("cancelled", reason, "cancelled")
                elif descriptor == self._streams.input:
                    continue  # there is room again
                else:
                    for event in backend.events():
                        self._take(event)
            self._follow_interrupt()
            self._check_deadlines()
        if self.name.encode() not in self._report:
            self._session.memory.note(ending=astuple(self._ending))
        return self._outcome(self._ending)

    def _patience_ms(self) -> float:
        """Return how long nothing needs doing."""
        now = time.monotonic()
        deadline = self._deadline()[0]
        if self.meter.waits:
            # The deadline of a command that waits moves on with the clock: it is not to be run after at every step.
            deadline = max(deadline, self._checked + CHECK_S)
        wanted = self._sample_at if self._kill else min(self._sample_at, deadline)
        if self._hooks.given and not self._has_begun:
            wanted = min(wanted, now + BEGIN_CHECK_S)
        if self._held_since < NEVER:
            wanted = min(wanted, now + HELD_CHECK_S)
        if self._interrupt is not None:
            wanted = min(wanted, self._interrupt.look_at)
        # A millisecond is the resolution of poll: rounding down would spin just before a deadline.
        return max(0.0, (wanted - now) * 1000 + 1)

    def _deadline(self) -> tuple[float, str]:
        """Return when the command is out of time, and why.

        Time without a core does not count while the command wants one in the background, nor does time in which it is paused. Its own
        sleep counts, so a program that hangs ends in time wherever it runs. Up to `timeout_s` more do not count while the command is held
        back for a reader of its output. So a slow reader fails no program, and holds cores for a bounded time.
        """
        request, starved_s = self._request, self.meter.starved_s
        held_s = self._held_before_s + max(0.0, time.monotonic() - self._held_since)
        counted_from = self._began - self._spent_s + starved_s
        execution = counted_from + request.timeout_s + min(held_s, request.timeout_s) if request.timeout_s else NEVER
        silent_s = max(0.0, starved_s - self._starved_until_printed_s)
        silence = self._printed + silent_s + request.output_timeout_s if request.output_timeout_s else NEVER
        if execution <= silence:
            return execution, f"ran longer than {request.timeout_s:g} s" if request.timeout_s else ""
        return silence, f"printed nothing for {request.output_timeout_s:g} s"

    def _check_deadlines(self) -> None:
        if self._ending is not None:
            return
        now = time.monotonic()
        at, reason = self._deadline()
        if now >= at and self._kill is None:
            self.meter.sample()
            self._checked = now
            at, reason = self._deadline()
        if now >= at and self._kill is None:
            self._end("timed_out", reason, "timeout")
        elif now >= min(self._abandon_at, self._do_without_at):
            self._press(now)
        elif now >= self._sample_at:
            self.meter.sample()
            self._session.memory.note_figures(*self.meter.figures())
            self._sample_at = now + self.meter.next_interval_s()
            if self._kill is None and (exceeded := self.meter.disk_limit_exceeded()):
                self._end("failed", exceeded, "disk_limit")

    def _press(self, now: float) -> None:
        """End by force a backend that does not answer the kill. If that brings no answer either, do without it."""
        if now >= self._do_without_at:
            self._ending = self._without_backend("what holds the session's processes does not answer")
            return
        self._abandon_at, self._do_without_at = NEVER, now + ANSWER_S
        self._shell.backend.abandon()

    def _pull(self, capture: Capture, events: int) -> None:
        if capture.pull():
            self._printed, self._starved_until_printed_s = time.monotonic(), self.meter.starved_s
        elif events & select.POLLHUP:
            self._poller.unregister(capture.descriptor)

    def _hold_back(self) -> None:
        """Stop reading what the command prints while its reader is behind, and go on afterwards."""
        if self._request.is_held is None:
            return
        was_held, is_held, now = self._held_since < NEVER, self._kill is None and self._request.is_held(), time.monotonic()
        if is_held:
            self._printed, self._starved_until_printed_s = now, self.meter.starved_s
        if is_held != was_held:
            self._held_before_s += max(0.0, now - self._held_since)
            self._held_since = now if is_held else NEVER
            for capture in self._streams.captures:
                if is_held:
                    with contextlib.suppress(KeyError):  # it has hung up
                        self._poller.unregister(capture.descriptor)
                else:
                    self._poller.register(capture.descriptor, select.POLLIN)

    def _serve_input(self) -> None:
        """Hand on what the command has been given, once it has begun."""
        given = self._hooks.given
        if self._kill is not None or not (given or self._has_begun) or not self._check_begun():
            return
        while given:
            each = given.popleft()
            if isinstance(each, Signal) and each.number == SIGINT and self._streams.terminal is not None:
                each = Data(INTERRUPT)
            if isinstance(each, Signal) and each.number == SIGINT:
                self._interrupt = Interrupt(self._shell.backend.command_processes, self._shell.pid)
            elif isinstance(each, Signal):
                self._shell.backend.signal(self._shell.pid, each.number)
            elif problem := self._streams.give(each):
                self._end("failed", problem, "bad_input")
                return
        before = self._streams.input
        is_left = before >= 0 and self._streams.write()
        if is_left:
            self._poller.register(before, select.POLLOUT)
        elif before >= 0:
            with contextlib.suppress(KeyError):
                self._poller.unregister(before)

    def _follow_interrupt(self) -> None:
        if self._interrupt is not None and self._kill is None and time.monotonic() >= self._interrupt.look_at:
            self._ended_by_interrupt |= self._interrupt.look()

    def _check_begun(self) -> bool:
        """Return whether the shell has come to the command: its streams have been opened, or its name has been read."""
        if not self._has_begun and self._streams.terminal is not None:
            self._has_begun = waits_in(self._go.fileno()) == 0
        elif not self._has_begun:
            self._has_begun = any(capture.was_opened() for capture in self._streams.captures)
        return self._has_begun

    def _read_report(self) -> None:
        """Take the shell's report if there is one; a line of another run is none of ours."""
        with contextlib.suppress(BlockingIOError):
            self._report = self._session.memory.take_report(self._done, self._report)
        own = self.name.encode()
        found = next((report for report in _REPORT.finditer(self._report) if report["run"] == own), None)
        # Commands can write here, too. No report is as long as what they may leave without an end.
        self._report = self._report[-LONGEST_REPORT:]
        if found is None or self._kill is not None or self._ending is not None:
            return
        self._check_refused((found["refusal"] or b"").decode())
        if self._streams.terminal is not None:
            # The shell has the terminal, and would end with it at any later moment.
            self._end("succeeded", "", "", int(found["code"]))
        else:
            self._ending = Ending("succeeded", int(found["code"]), "", self.meter.over())

    def _check_refused(self, word: str) -> None:
        """Raise what kept the command from beginning, where the shell names it in `word`, or the program never opened its streams."""
        has_no_terminal = self._streams.terminal is None
        if has_no_terminal and any(capture.was_opened() for capture in self._streams.captures):
            return
        if word in REFUSALS or (has_no_terminal and self._streams.words is not None):
            raise refusal(word, self._request.cwd, self._streams.words, self._shell.backend.folder())

    def _end(self, status: Status, reason: str, cause: str, exit_code: int | None = None) -> None:
        """Have the command's processes killed, unless that is under way."""
        if self._kill is None and self._ending is None:
            self._kill = (status, exit_code, reason, cause)
            self._session.memory.note(kill=self._kill)
            self._hooks.on_ending()
            if self._takes_back() or status == "succeeded":
                self._session.await_saving()
            self._session.remember_folder()
            self._descriptors.enter_context(self._session.setup.backends.awake())
            self._shell.backend.kill(GRACE_S)
            self._abandon_at = time.monotonic() + ANSWER_S

    def _takes_back(self) -> bool:
        """Take the run back where the shell has not read its name, as it may still save the state; return whether that was so.

        A command can write the name of its own run to `go` once more, so that it is waited for. But then its streams are open.
        """
        is_unseen = self._go.read(LONGEST_REPORT) == f"{self.name}\n".encode()
        has_begun = not is_unseen or self._check_begun()
        self._go.close()
        return not has_begun

    def _take(self, event: Event) -> None:
        match event:
            case Exited(shell=pid, code=code) if pid == self._shell.pid:
                self._session.lose_shell()
                if self._kill is None and not self._check_begun() and not self.meter.remark():
                    self._not_begun()
                    return
                # The report may have come after the poll read `done` and before it read the backend.
                self._read_report()
                # A shell that a closing environment ended is followed by the end of its backend.
                if self._kill is None and self._ending is None and not self._session.closed:
                    cpu_s = self.meter.over(event.max_rss_mb)
                    code = INTERRUPTED if self._ended_by_interrupt else code
                    self._ending = Ending("succeeded", code, "the command ended its shell", cpu_s)
            case Gone(left=left) if self._kill is not None:
                status, exit_code, reason, cause = self._kill
                self._session.lose_shell()
                note = f"; processes that cannot be killed: {', '.join(map(str, left))}" if left else ""
                cpu_s = self.meter.over(event.max_rss_mb)
                self._ending = Ending(status, exit_code, reason + note, cpu_s, cause)
            case HungUp(reason=reason):
                self._read_report()
                without = self._without_backend(reason)
                self._ending = self._ending or without

    def _not_begun(self) -> None:
        """Give the command back, unless a kill or a closing environment, whose own end follows, was the reason."""
        if self._kill is None and not self._session.closed:
            raise NotBegun("the shell ended before it came to the command")

    def _without_backend(self, reason: str) -> Ending:
        closed, loss = self._session.closed, self._session.loss
        self.meter.sample()
        self._session.lose_backend()
        if self._kill is not None:
            status, exit_code, why, cause = self._kill
            return Ending(status, exit_code, why, self.meter.last_s, cause)
        if loss:
            return Ending("lost", None, loss, self.meter.last_s, self._session.loss_cause)
        if closed:
            return Ending("cancelled", None, "the environment was closed", self.meter.last_s, "environment_closed")
        return Ending("failed", None, reason or "what held the session's processes was killed", self.meter.last_s, "sandbox_failed")

    def _outcome(self, ending: Ending) -> ExecOutcome:
        background_s = self.meter.starved_s
        execution_s = max(0.0, time.monotonic() - self._began - background_s)
        self._session.remember_folder()
        held = [capture.finish() for capture in self._streams.captures]
        self._hand_on(held)
        stdout, stderr = self._streams.outputs()
        remark, cause = self._remark(ending), ending.cause
        status, exit_code = ending.status, ending.exit_code
        if exit_code and remark and not self.meter.was_full():
            status, exit_code, cause = "failed", None, SandboxError.cause
        elif exit_code:
            cause = "out_of_memory" if remark else "exit"
        return ExecOutcome(
            status=status,
            exit_code=exit_code,
            stdout=stdout,
            stderr=stderr,
            truncated=any(capture.truncated for capture in self._streams.captures),
            reason="; ".join(filter(None, (ending.reason, remark))),
            execution_s=execution_s,
            cpu_s=ending.cpu_s,
            max_rss_mb=self.meter.max_rss_mb,
            background_s=background_s,
            slept_s=self.meter.waited_s - background_s,
            cause=cause,
        )

    def _remark(self, ending: Ending) -> str:
        """Return what the reason does not say yet of how the command fared."""
        if ending.status == "lost":
            return ""
        remark = self.meter.remark()
        # A command that was killed together with its environment. One with another code had ended before.
        if not remark and ending.exit_code == KILLED and (loss := self._session.loss) and self._session.loss_cause == MemoryFull.cause:
            return loss
        return remark

    def _hand_on(self, held: list[bool]) -> None:
        """Give streams that a background process still holds to the drain, and take fresh ones for the next command."""
        for capture, fifo, is_held in zip(self._streams.captures, self._session.streams, held, strict=False):
            if is_held:  # a terminal is not
                self._session.renew(fifo)
                self._session.setup.drain.adopt(os.dup(capture.descriptor))
