"""How SWE-ReX's calls use an interactive program: a line, an interrupt, the end; answers are those of SWE-ReX's own server.

| call | answered with |
|---|---|
| `is_interactive_command`, `is_interactive_quit` | what was printed before the pattern, exit code 0 whatever the program's |
| `expect` alone | the exit code, where the command ends within 5 s after the pattern; else none, an error with `check="raise"` |
| an interrupt | what was printed up to a pattern, or up to the end of the program |

A program that ignores interrupts is ended.
"""

from __future__ import annotations

import contextlib

from app.gateway import rex_models as wire
from app.gateway.context import Gateway
from app.gateway.records import Record
from app.gateway.rex_errors import non_zero, swerex_error
from app.gateway.rex_programs import LEAST_INTERRUPT_S, PROMPT, Program, Programs, Seen, compiled, tidied
from app.gateway.sessions import Caller

HOLD_S = 280.0
"""Longest time that a call without a time limit is held, seconds; clients wait for 300 s."""

CODE_S = 5.0
"""How long a command that has shown its pattern is waited for, seconds, so that its exit code is known."""


class Dialogue:
    """The calls on the interactive programs of one environment."""

    def __init__(self, gateway: Gateway, caller: Caller, record: Record) -> None:
        self._programs = Programs(gateway, caller, record)
        self._session = caller.session

    async def check_free(self, name: str, session: str) -> None:
        """Refuse a command for a shell in which an interactive program runs: it would wait for that without an end."""
        if (program := await self._programs.running(session)) is not None:
            message = (
                f"session {name!r} runs the interactive program {program.command!r}: "
                "end it with is_interactive_quit or an interrupt, or send it a line with is_interactive_command"
            )
            raise swerex_error("SwerexException", message)

    async def run(self, body: wire.BashAction, session: str, mark: str) -> wire.Observation:
        """Give a program a line, or start it, and read until a pattern or its end."""
        if (known := await self._programs.answered(mark)) is not None:
            return wire.Observation.model_validate_json(known)
        patterns = compiled(body.expect)  # What is wrong with them is said before the program is given anything.
        program = await self._programs.say(session, body.command, mark)
        try:
            seen = await self._programs.read(session, program, patterns, body.timeout or HOLD_S)
        except TimeoutError:
            message = f"timeout after {body.timeout} seconds while running command {body.command!r}"
            raise swerex_error("CommandTimeoutError", message) from None
        is_dialogue = body.is_interactive_command or body.is_interactive_quit
        answer = _observation(body, seen) if is_dialogue else await self._with_code(body, session, seen)
        await self._programs.answer(mark, answer.model_dump_json())
        return answer

    async def interrupt(self, body: wire.BashInterrupt, session: str) -> wire.Observation | None:
        """Interrupt the program of a session; None where none runs there."""
        program = await self._programs.running(session)
        if program is None:
            return None
        patterns = compiled(body.expect)
        for _ in range(body.n_retry):
            await self._programs.interrupt(program)
            with contextlib.suppress(TimeoutError):
                seen = await self._programs.read(session, program, patterns, max(body.timeout or 0.0, LEAST_INTERRUPT_S))
                return wire.Observation(output=seen.output.strip(), exit_code=0, expect_string=seen.pattern)
        return wire.Observation(output=await self._ended(session, program), exit_code=0, expect_string=PROMPT)

    async def end(self, session: str) -> None:
        """End the program of a session, if there is one."""
        if (program := await self._programs.running(session)) is not None:
            await self._ended(session, program)

    async def _ended(self, session: str, program: Program) -> str:
        """End a program and return what it had printed."""
        self._session.cancel_task(self._programs.action_of(program))
        return (await self._programs.read(session, program, (), HOLD_S)).output.strip()

    async def _with_code(self, body: wire.BashAction, session: str, seen: Seen) -> wire.Observation:
        """Answer a command that is not said to be interactive, and so is to have an exit code."""
        output, code = seen.output, seen.exit_code
        program = await self._programs.last(session) if seen.pattern is not PROMPT else None
        if program is not None:
            with contextlib.suppress(TimeoutError):
                rest = await self._programs.read(session, program, (), CODE_S)
                output, code = output + rest.output, rest.exit_code
        if body.check == "raise" and code is None:
            raise swerex_error("NoExitCodeError", f"timeout while getting exit code of {body.command!r}")
        if body.check == "raise" and code != 0:
            raise non_zero(body, code, f"Here is the output:\n{output!r}")
        return wire.Observation(output=output, exit_code=None if body.check == "ignore" else code, expect_string=seen.pattern)


def _observation(body: wire.BashAction, seen: Seen) -> wire.Observation:
    output = seen.output if body.is_interactive_quit else tidied(seen.output, body.command)
    return wire.Observation(output=output, exit_code=0, expect_string=seen.pattern)
