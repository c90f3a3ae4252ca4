"""Interactive programs in SWE-ReX's shells: a debugger or an interpreter that is given a line, and is read until it waits for the next.

Such a program is one action with a terminal, which runs from the line that starts it to its end. What it prints is a stream in the result
store (`tangram.streams`), what it is given goes to its node (`tangram.input_messages`). So each of its lines may come through another
copy of the gateway. The shell's entry says how far its output has been read:

| key | holds |
|---|---|
| `tangram-gw-rex-programs-<environment>` | hash: by session, the program that runs in it, JSON |
| `tangram-gw-rex-sent-<mark>` | there where the call of this mark has sent its line |
| `tangram-gw-rex-said-<mark>` | what the call of this mark was answered |

What comes first decides what a call is answered: one of the patterns that it expects, or the end of the program. Output behind a pattern
waits for the next call. After a timeout all output does.
"""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import re2
from pydantic import BaseModel

from app.gateway import calls
from app.gateway import rex_scripts as scripts
from app.gateway.context import Gateway
from app.gateway.errors import Cancelled
from app.gateway.records import KEPT_S, Record
from app.gateway.rex_errors import RemoteError, swerex_error
from app.gateway.sessions import Caller
from tangram import input_messages
from tangram.action import Action, command_class
from tangram.calls import execute
from tangram.handles import Handle
from tangram.results import Chunk
from tangram.wire import GIVEN_BYTES, RESULT_TTL_S

PROMPT = "SHELLPS1PREFIX"
"""What a call is told to have seen where a shell is free again, as SWE-ReX's own server calls it."""

INTERRUPTED_CODE = 130
"""The exit code of what was interrupted, as shells have it."""

LIFE_S = 3600.0
"""Longest time that an interactive program may run, seconds: nobody else ends one whose client has left it."""

LEAST_INTERRUPT_S = 1.0
"""Least time that an interrupt has to take effect, seconds: it goes through the scheduler to the node."""

WINDOW_BYTES, MOST_BYTES = 64 * 1024, 1024 * 1024
"""How far back patterns are looked for, and how much output is kept for a call."""

PATTERN_BYTES = 1024 * 1024
"""Most memory of one compiled pattern. Callers choose patterns, so RE2 runs them: its time is linear in the text, whatever the pattern."""

PATTERN_STEPS = 10_000
"""Largest program that RE2 may make of all patterns of a call. At worst each of its steps is taken for each character: some ten seconds."""

_PROGRAMS, _SENT, _SAID = "tangram-gw-rex-programs-", "tangram-gw-rex-sent-", "tangram-gw-rex-said-"
_TERMINAL = (24, 200)
_WAITING_CHECK_S = 0.5


class Program(BaseModel):
    """A program and how far it was read: `after` is the last chunk of output that was taken, `left` what of it no call was given yet."""

    key: str
    command: str
    variables: dict[str, str]
    after: str = "0"
    left: str = ""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a program has printed, and the pattern that ended the reading; `PROMPT` where the program has ended."""

    output: str
    pattern: str
    exit_code: int | None = None


class Programs:
    """The interactive programs of one environment, for one call."""

    def __init__(self, gateway: Gateway, caller: Caller, record: Record) -> None:
        self._gateway, self._caller, self._record = gateway, caller, record
        self._key = _PROGRAMS + record.id

    async def running(self, session: str) -> Program | None:
        """Return the program that runs in a session; None where that is free."""
        program = await self.last(session)
        if program is None:
            return None
        known = await self._gateway.journal.action(self.action_of(program))
        if known is None or known.status in ("waiting", "running"):
            return program
        await self.forget(session)
        return None

    async def last(self, session: str) -> Program | None:
        """Return the program that runs in a session, or has ended there with output that no call was given yet."""
        raw = await cast(Any, self._gateway.store.hget(self._key, session))
        return Program.model_validate_json(raw) if raw is not None else None

    def action_of(self, program: Program) -> str:
        """Return the id of a program's action."""
        return self._caller.task_id("cpu.exec", self._record.id, program.key)

    async def forget(self, session: str) -> None:
        """Take note that a session is free."""
        await cast(Any, self._gateway.store.hdel(self._key, session))

    async def say(self, session: str, line: str, mark: str) -> Program:
        """Give the program of a session a line, or start what the line says; a call that comes again gives it once."""
        store = self._gateway.store
        program = await self.running(session)
        begun = Program(key=f"rex-program-{mark}", command=line, variables=dict(self._record.variables))
        if program is None:
            _action(self._record, begun, session)  # What is wrong with it is said before anything is written.
        if not await store.set(_SENT + mark, "1", nx=True, ex=RESULT_TTL_S):
            if program is None:
                raise swerex_error("SwerexException", "the call was made before, and what it said is not known any more")
            return program
        if program is not None:
            data = f"{line}\n".encode("utf-8", "surrogatepass")
            for at in range(0, len(data), GIVEN_BYTES):
                await self._give(program, input_messages.data(data[at : at + GIVEN_BYTES]))
            return program
        await self._keep(session, begun)
        self._submitted(begun, session)
        return begun

    async def interrupt(self, program: Program) -> None:
        """Type Ctrl-C."""
        await self._give(program, input_messages.signal_of(2))

    async def read(self, session: str, program: Program, patterns: Sequence[Any], timeout_s: float) -> Seen:
        """Read what a program prints until one of the patterns comes, as `compiled` returns them, or its end.

        Raises `TimeoutError` after `timeout_s` seconds, of which its wait in the queue is none; all that it has printed is read again then.
        """
        handle = self._submitted(program, session)
        chunks = cast(AsyncGenerator[Chunk, None], self._caller.session.streams.read_async(handle.id, program.after))
        buffer, after = bytearray(program.left.encode("utf-8", "surrogateescape")), program.after
        deadline, lost = time.monotonic() + timeout_s, 0
        coming = asyncio.ensure_future(calls.next_chunk(chunks))
        try:
            while True:
                text = bytes(buffer).decode("utf-8", "surrogateescape")
                if (found := await asyncio.to_thread(_search, patterns, text)) is not None:
                    which, start, end = found
                    await self._keep(session, program.model_copy(update={"after": after, "left": text[end:]}))
                    return Seen(_shown(text[:start], lost), patterns[which].pattern)
                if not await self._comes(coming, deadline, handle):
                    raise TimeoutError
                if (chunk := coming.result()) is None:
                    await self.forget(session)
                    return Seen(_shown(text, lost), PROMPT, await _exit_code(handle))
                buffer += chunk.data
                lost += chunk.dropped + max(0, len(buffer) - MOST_BYTES)
                del buffer[:-MOST_BYTES]
                after = chunk.id
                coming = asyncio.ensure_future(calls.next_chunk(chunks))
        finally:
            coming.cancel()
            await asyncio.wait([coming])
            await chunks.aclose()

    async def answered(self, mark: str) -> str | None:
        """Return what the call of a mark was answered, JSON; None where it was not yet."""
        raw = await self._gateway.store.get(_SAID + mark)
        return raw.decode() if isinstance(raw, bytes) else raw

    async def answer(self, mark: str, content: str) -> None:
        """Keep what the call of a mark is answered."""
        await self._gateway.store.set(_SAID + mark, content, ex=RESULT_TTL_S)

    async def _comes(self, coming: asyncio.Future[Chunk | None], deadline: float, handle: Handle[Any]) -> bool:
        """Wait for output or the end, as long as a program has time; one that waits in the queue has not begun to use it."""
        while not coming.done():
            left_s = deadline - time.monotonic()
            await asyncio.wait([coming], timeout=max(left_s, _WAITING_CHECK_S) if left_s > 0 else _WAITING_CHECK_S)
            if not coming.done() and time.monotonic() >= deadline:
                known = await self._gateway.journal.action(handle.id)
                if known is None or known.status != "waiting":
                    return False
        return True

    def _submitted(self, program: Program, session: str) -> Handle[Any]:
        """Return a handle on the action of a program, which is submitted unless it was."""
        return calls.submit(self._caller, _action(self._record, program, session), key=program.key)

    async def _keep(self, session: str, program: Program) -> None:
        await cast(Any, self._gateway.store.hset(self._key, session, program.model_dump_json()))
        await self._gateway.store.expire(self._key, KEPT_S)

    async def _give(self, program: Program, what: input_messages.What) -> None:
        await asyncio.wrap_future(self._caller.session.give(self.action_of(program), what).sent)


def tidied(output: str, line: str) -> str:
    """Return what a program printed without the line that it was given, which terminals repeat, as SWE-ReX's own server does."""
    return output.lstrip().removeprefix(line).strip()


def _action(record: Record, program: Program, session: str) -> Action:
    text = f"\\stty -echo 2>/dev/null; \\eval {shlex.quote(program.command)}"
    return execute(
        record.place,
        text,
        session=session,
        units=record.units,
        timeout_s=LIFE_S,
        variables={"TERM": "dumb", **program.variables},
        action_class=command_class(program.command),
        stream=True,
        pty=_TERMINAL,
    )


def compiled(patterns: Sequence[str]) -> list[Any]:
    """Return patterns of RE2, ready to be searched for. Raises `RemoteError` where one is none, or all are too large together."""
    options = re2.Options()
    options.max_mem, options.dot_nl, options.log_errors = PATTERN_BYTES, True, False
    ready = list[Any]()
    for pattern in patterns:
        try:
            ready.append(re2.compile(pattern, options))
        except re2.error as error:
            raise RemoteError("builtins.ValueError", f"expect: {error.args[0].decode()} (patterns are RE2's)") from error
        if sum(one.programsize for one in ready) > PATTERN_STEPS:
            raise RemoteError("builtins.ValueError", "expect: the patterns are too large together")
    return ready


def _search(patterns: Sequence[Any], text: str) -> tuple[int, int, int] | None:
    """Return which pattern comes first in a text, and from where to where; of those that begin at one place, the first of them."""
    readable = text.encode("utf-8", "replace").decode()  # as many characters
    found = [pattern.search(readable, max(0, len(text) - WINDOW_BYTES)) for pattern in patterns]
    places = [(match.start(), which, match.end()) for which, match in enumerate(found) if match is not None]
    if not places:
        return None
    start, which, end = min(places)
    return which, start, end


def _shown(text: str, lost: int) -> str:
    plain = scripts.plain(text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace"))
    return f"[{lost} bytes are left out here: of one call, the last {MOST_BYTES} are kept]\n{plain}" if lost else plain


async def _exit_code(handle: Handle[Any]) -> int | None:
    """Return the exit code of a program that has ended, that of an interrupt where somebody has ended it. Raises other `GatewayError`s."""
    try:
        result = await calls.wait(handle, cancel=False)
    except Cancelled:
        return INTERRUPTED_CODE
    return cast("int | None", result.exit_code)
