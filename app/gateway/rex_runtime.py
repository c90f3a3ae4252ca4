"""SWE-ReX's verbs on one environment, for the shapes that have them.

A shell of SWE-ReX is a session of the environment, under a name that is new each time it is created, so that a shell which is created
again begins afresh. The names are kept in the result store:

| key | holds |
|---|---|
| `tangram-gw-rex-<environment>` | hash, kept as long as the record: by the name that the client gave, the session's |
| `tangram-gw-rex-interrupted-<action>` | there where an interrupt has cancelled this action |
| `tangram-gw-rex-closed-<mark>` | there where the call of this mark has closed a shell |

Programs beside all shells (`execute`) use sessions of their own, as few as run at once; `e2b_table.py` has which are taken.
"""

from __future__ import annotations

import asyncio
import io
import random
import secrets
import signal
import time
from contextlib import suppress
from itertools import count
from typing import Any

from starlette.requests import Request

from app.gateway import calls
from app.gateway import rex_models as wire
from app.gateway import rex_scripts as scripts
from app.gateway.context import Gateway
from app.gateway.errors import BadRequest, Cancelled, NotFound, Overloaded
from app.gateway.records import KEPT_S, SHELLS_PREFIX, Record
from app.gateway.rex_dialogue import Dialogue
from app.gateway.rex_errors import non_zero, of_arguments, of_file, swerex_error
from app.gateway.rex_programs import INTERRUPTED_CODE, LEAST_INTERRUPT_S, PROMPT
from app.gateway.sessions import Caller, digest
from app.gateway.stored_results import stored_result
from tangram import calls as words
from tangram import input_messages
from tangram.action import Action, command_class
from tangram.arguments import process_variables
from tangram.calls import ExecOptions
from tangram.errors import ActionError, InvalidAction
from tangram.results import LEFT_OUT, ExecResult, SubmissionCut
from tangram.wire import RESULT_TTL_S

HOLD_S = 280.0
"""Longest time that an action which found its queue full is offered again, seconds; clients wait for 300 s."""

_INTERRUPTED, _CLOSED = "tangram-gw-rex-interrupted-", "tangram-gw-rex-closed-"
_LONGEST_PAUSE_S, _LOOK_S = 4.0, 0.02
_EXECUTE = "rex-execute"


class Runtime:
    """The verbs for one call: on the environment of `record`, once per `key` where there is one."""

    def __init__(self, gateway: Gateway, caller: Caller, record: Record, key: str | None, request: Request) -> None:
        self._gateway, self._caller, self._record = gateway, caller, record
        self._key, self._request = key, request
        self.mark = f"tangram-{digest(key)}" if key else f"tangram-{secrets.token_hex(16)}"
        """A word that belongs to this call alone."""
        self._steps = count()
        self._dialogue = Dialogue(gateway, caller, record)
        self._units = record.units

    # -- shells --------------------------------------------------------------------------------------------------

    async def create_session(self, body: wire.CreateSession) -> wire.SessionStarted:
        """Start a shell and have it read its startup files."""
        store, sessions = self._gateway.store, SHELLS_PREFIX + self._record.id
        session = f"rex-{digest(body.session, self.mark)}"
        if not await store.hsetnx(sessions, body.session, session) and await self._session(body.session) != session:
            raise swerex_error("SessionExistsError", f"session {body.session} already exists")
        await store.expire(sessions, self._record.kept_s)
        try:
            text = scripts.start_text(body.startup_source, process_variables(body.env) or {})
            result = await self._exec(text, session, "create_session", timeout_s=body.startup_timeout)
            if result.status == "timed_out":
                message = f"the startup of session {body.session} took longer than {body.startup_timeout:g} seconds"
                raise swerex_error("CommandTimeoutError", message, output=result.stdout)
        except BaseException:
            await asyncio.shield(store.hdel(sessions, body.session))
            raise
        return wire.SessionStarted(output=scripts.plain(result.stdout))

    async def run(self, body: wire.BashAction) -> wire.Observation:
        """Run a command in a shell."""
        session = await self._session(body.session)
        if body.is_interactive_command or body.is_interactive_quit or body.expect:
            return await self._dialogue.run(body, session, self.mark)
        await self._dialogue.check_free(body.session, session)
        name = command_class(body.command)
        try:
            result = await self._exec(scripts.run_text(body.command, self.mark), session, name, timeout_s=body.timeout)
        except Cancelled as error:
            if not await self._gateway.store.exists(_INTERRUPTED + self._action_id):
                raise
            return self._checked(body, wire.Observation(exit_code=INTERRUPTED_CODE, failure_reason=str(error)))
        if scripts.is_wrong_syntax(result.stdout, result.stderr, result.exit_code, self.mark):
            raise _bad_syntax(body.command, result)
        output = scripts.plain(result.stdout)
        if result.status == "timed_out":
            message = f"timeout after {body.timeout} seconds while running command {body.command!r}"
            raise swerex_error("CommandTimeoutError", message, output=output)
        seen = self._checked(
            body, wire.Observation(output=output, exit_code=result.exit_code, failure_reason=result.remark, expect_string=PROMPT)
        )
        if body.check == "raise":
            _check_whole(body.command, result)
        return seen

    async def interrupt(self, body: wire.BashInterrupt) -> wire.Observation:
        """Interrupt what runs in a shell, and wait until the shell is free, or its interactive program for the next line."""
        session = await self._session(body.session)
        if (seen := await self._dialogue.interrupt(body, session)) is not None:
            return seen
        output = ""
        for action in await self._gateway.journal.unfinished(self._record.id, session):
            output += await self._interrupted(action, body)
        await self._exec(":", session, "interrupt")
        return wire.Observation(output=output.strip(), exit_code=0, expect_string=PROMPT)

    async def _interrupted(self, action: str, body: wire.BashInterrupt) -> str:
        """Send a command SIGINT, and return what it had printed; one that goes on all the same is cancelled, and so is one that waits."""
        known = await self._gateway.journal.action(action)
        tries = body.n_retry if known is not None and known.status == "running" else 0
        for _ in range(tries):
            await asyncio.wrap_future(self._caller.session.give(action, input_messages.signal_of(signal.SIGINT)).sent)
            deadline = time.monotonic() + max(body.timeout or 0.0, LEAST_INTERRUPT_S)
            while time.monotonic() < deadline:
                with suppress(ActionError):
                    if (stored := await stored_result(self._gateway, "cpu.exec", action)) is not None:
                        return scripts.plain(stored.value.stdout)
                await asyncio.sleep(_LOOK_S)
        await self._gateway.store.set(_INTERRUPTED + action, "1", ex=KEPT_S)
        self._caller.session.cancel_task(action)
        return ""

    async def close_session(self, body: wire.CloseSession) -> wire.SessionClosed:
        """End a shell and the jobs that it still has."""
        store = self._gateway.store
        if not await store.exists(_CLOSED + self.mark):
            session = await self._session(body.session)
            await self._dialogue.end(session)
            await self._exec(scripts.HANG_UP, session, "close_session")
            # What was disowned outlives its shell, as with a terminal.
            await self._act(words.close_session(self._record.place, session, idle_only=True))
            await store.set(_CLOSED + self.mark, "1", ex=RESULT_TTL_S)
            await store.hdel(SHELLS_PREFIX + self._record.id, body.session)
        return wire.SessionClosed()

    # -- programs and files --------------------------------------------------------------------------------------

    async def execute(self, body: wire.Command) -> wire.CommandDone:
        """Run a program beside all shells."""
        name = command_class(body.command if isinstance(body.command, str) else body.command[0])
        try:
            variables = process_variables(body.env) or {}
            cleared = [] if body.env is None else ["env", "-i", *(f"{name}={value}" for name, value in variables.items())]
            *interpreter, last = [*cleared, *body.argv]
            how: ExecOptions = {"interpreter": interpreter, "cwd": body.cwd, "merged": body.merge_output_streams}
            result = await self.beside(last, name, timeout_s=body.timeout, how=how)
        except InvalidAction as error:
            raise of_arguments(error) from error
        except BadRequest as error:
            raise of_file(body.cwd or "" if "Folder" in error.problem else body.argv[0], error) from error
        if result.status == "timed_out":
            message = f"Timeout ({body.timeout}s) exceeded while running command"
            raise swerex_error("CommandTimeoutError", message, stdout=result.stdout, stderr=result.stderr)
        if body.check and result.exit_code != 0:
            raise non_zero(body, result.exit_code, f"Stdout:\n{result.stdout!r}\nStderr:\n{result.stderr!r}")
        if body.check:
            _check_whole(body.command, result)
        try:
            result.whole_submission()
        except SubmissionCut as error:
            raise swerex_error("SwerexException", str(error)) from error
        remark = f"\n[{result.remark}]\n" if result.remark and body.merge_output_streams else ""
        stderr = result.stderr if body.merge_output_streams else result.stderr_and_remark
        return wire.CommandDone(stdout=result.stdout + remark, stderr=stderr, exit_code=result.exit_code)

    async def beside(self, text: str, name: str, *, timeout_s: float | None = None, how: ExecOptions | None = None) -> ExecResult:
        """Run a command outside of the client's shells."""
        async with self._gateway.tables.of(self._record.id).unlisted_session(_EXECUTE) as session:
            return await self._exec(text, session, name, timeout_s=timeout_s, how=how)

    async def read_file(self, body: wire.ReadFile) -> wire.FileRead:
        """Return the text of a file, its line ends as Python reads them."""
        try:
            data: bytes = await self._act(words.read_file(self._record.place, body.path))
        except BadRequest as error:
            raise of_file(body.path, error) from error
        return wire.FileRead(content=await asyncio.to_thread(_text, data, body))

    async def write_file(self, path: str, data: bytes, offset: int | None = None) -> None:
        """Write a file, or its end from `offset` on."""
        try:
            await self._act(words.write_file(self._record.place, path, data, offset=offset))
        except BadRequest as error:
            raise of_file(path, error) from error

    # -- how ------------------------------------------------------------------------------------------------------

    async def _session(self, name: str) -> str:
        session = await self._gateway.store.hget(SHELLS_PREFIX + self._record.id, name)
        if session is None:
            raise swerex_error("SessionDoesNotExistError", f"session {name!r} does not exist")
        return session.decode() if isinstance(session, bytes) else str(session)

    async def _exec(
        self, text: str, session: str, name: str, *, timeout_s: float | None = None, how: ExecOptions | None = None
    ) -> ExecResult:
        options: ExecOptions = {**(how or {}), "units": self._units, "variables": self._record.variables, "timeout_s": timeout_s}
        options |= {"session": session, "action_class": name}
        result: ExecResult = await self._act(words.execute(self._record.place, text, **options))
        return result

    async def _act(self, action: Action) -> Any:
        """Run an action and wait for it; one whose queue is full is held and offered again, since clients never come a second time."""
        deadline, step = time.monotonic() + HOLD_S, next(self._steps)
        action = await calls.put_aside(self._caller, action)
        for attempt in count():
            # Writes and commands run once per key. A second attempt is another action: the first was refused, so it never ran.
            key = None if self._key is None or action.idempotent else f"{self._key}/{step}/{attempt}"
            handle = calls.submit(self._caller, action, key=key)
            self._action_id = handle.id
            try:
                return await calls.wait(handle, cancel=key is None, request=self._request if key is None else None)
            except Overloaded:
                pause_s = min(_LONGEST_PAUSE_S, 0.2 * 2**attempt) * random.uniform(0.5, 1.0)
                if time.monotonic() + pause_s > deadline:
                    raise
                await asyncio.sleep(pause_s)
        raise AssertionError("unreachable")

    def _checked(self, body: wire.BashAction, seen: wire.Observation) -> wire.Observation:
        if body.check == "raise" and seen.exit_code != 0:
            raise non_zero(body, seen.exit_code, f"Here is the output:\n{seen.output!r}")
        return seen.model_copy(update={"exit_code": None}) if body.check == "ignore" else seen


async def close(gateway: Gateway, caller: Caller, record: Record) -> None:
    """Close an environment, and forget its shells; one that is gone already is closed."""
    with suppress(NotFound):
        await gateway.environments.close(caller, record.id)
    await gateway.store.delete(SHELLS_PREFIX + record.id)


async def alive(gateway: Gateway, record: Record) -> wire.Alive:
    """Say whether an environment stands, without an action."""
    if record.state != "open":
        return wire.Alive(is_alive=False, message=f"environment {record.id} is being opened")
    end = await gateway.journal.end_of(record.id)
    return wire.Alive(is_alive=end is None, message="" if end is None else f"environment {record.id} has ended: {end.reason}")


def _text(data: bytes, body: wire.ReadFile) -> str:
    try:
        text = io.TextIOWrapper(io.BytesIO(data), encoding=body.encoding or "utf-8", errors=body.errors).read()
        text.encode()  # what `surrogateescape` and `surrogatepass` make of some bytes cannot travel as JSON
        return text
    except (UnicodeError, LookupError, ValueError) as error:
        raise swerex_error("SwerexException", f"{type(error).__name__}: {error}") from error


def _check_whole(command: str | list[str], result: ExecResult) -> None:
    """Refuse output of which something is left out, to a caller that wants success or an error: it may be a patch, or the log of a test."""
    if result.truncated:
        raise swerex_error("SwerexException", f"the output of command {command!r} is not whole: {LEFT_OUT}")


def _bad_syntax(command: str, result: ExecResult) -> Exception:
    message = f"Error (exit code {result.exit_code}) while checking bash command \n{command!r}\n---- Stderr ----\n{result.stderr}"
    return swerex_error("BashIncorrectSyntaxError", message, bash_stdout="", bash_stderr=result.stderr)
