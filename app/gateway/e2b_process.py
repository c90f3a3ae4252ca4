"""E2B's `/process.Process`: commands of a sandbox, each one an action.

The time limit of `Start` is that of the action, its wait in the queue included. A command whose connection breaks goes on until then, and
can be joined with `Connect` by its number, through any copy of the gateway. `keepalive` is sent while it waits or prints nothing.

A command runs as the sandbox's own user, whoever the request names.
"""

from __future__ import annotations

import asyncio
import base64
import shlex
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from typing import Any, Literal, cast

from fastapi import Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field

from app.gateway import calls
from app.gateway.e2b import RpcError, Sandbox, SandboxGone, SandboxOf, data_errors, rpc_error
from app.gateway.e2b_connect import STREAM_TYPE, end_of_stream, envelope, limit_of, only_message, parsed
from app.gateway.e2b_table import Process, Program, Table
from app.gateway.errors import Cancelled, Overloaded, classify
from app.gateway.shape import counted, shape_router
from tangram.action import Action, command_class
from tangram.calls import execute
from tangram.errors import TangramError
from tangram.handles import Handle
from tangram.results import Chunk, ExecResult

KEEPALIVE_S = 20.0
"""Seconds between two signs of life of a stream, unless its client asks for more."""

UNLIMITED_S = 24 * 3600.0
"""Longest time that a command without a limit may run, seconds. Its sandbox's lease is over sooner."""

SHORT_S = 0.03
"""A command that runs for longer has its output sent while it runs."""

CHUNK_BYTES = 128 * 1024
"""Most output in one message."""

KILLED = "signal: killed"

_SUBMIT_S = 60.0
"""Seconds until an action that was submitted is in the journal at the latest."""

_running: set[asyncio.Task[None]] = set()
router = shape_router("e2b", data_errors, prefix="/process.Process", tags=["e2b"])


class Config(BaseModel):
    """A program to run."""

    cmd: str = Field(min_length=1)
    args: list[str] = []
    envs: dict[str, str] = {}
    cwd: str | None = None


class StartMessage(BaseModel):
    """A program to start."""

    process: Config
    pty: dict[str, Any] | None = None
    tag: str | None = None
    stdin: bool = False


class Selector(BaseModel):
    """Which process is meant."""

    pid: int = 0
    tag: str = ""


class SelectMessage(BaseModel):
    """A message that names a process."""

    process: Selector = Selector()


class SignalMessage(SelectMessage):
    """A signal for a process."""

    signal: Literal["SIGNAL_SIGTERM", "SIGNAL_SIGKILL", 9, 15]


@router.post("/Start")
async def start(request: Request, sandbox: SandboxOf) -> StreamingResponse:
    """Run a program and stream what becomes of it."""
    message = parsed(StartMessage, await only_message(request))
    if message.pty is not None:
        raise RpcError("unimplemented", "terminals are not served here")
    limit_s, now = limit_of(request), time.time()
    program = Program(
        **message.process.model_dump(),
        tag=message.tag,
        stdin=message.stdin,
        started_at=now,
        ends_at=None if limit_s is None else now + limit_s,
    )
    action = _action(sandbox, program, "main")  # what is wrong with it is said before anything is written
    table = Table(sandbox.gateway.store, sandbox.record.id)
    process = await table.add(program)
    try:
        action = _action(sandbox, program, process.session_name)
        handle = calls.submit(sandbox.caller, await calls.put_aside(sandbox.caller, action), key=process.key)
    except TangramError:
        await table.remove(process)
        raise
    running = asyncio.create_task(_attend(handle, process, table))
    _running.add(running)
    running.add_done_callback(_running.discard)
    return _stream(request, sandbox, process, handle, running)


@router.post("/Connect")
async def connect(request: Request, sandbox: SandboxOf) -> StreamingResponse:
    """Stream what becomes of a process that runs; a time limit ends the stream, not the process."""
    process = await _find(sandbox, parsed(SelectMessage, await only_message(request)).process)
    action = _action(sandbox, process.program, process.session_name)
    handle = calls.submit(sandbox.caller, action, key=process.key)
    return _stream(request, sandbox, process, handle, None)


@router.post("/List")
async def list_processes(sandbox: SandboxOf) -> dict[str, Any]:
    """Return the processes that run."""
    table = Table(sandbox.gateway.store, sandbox.record.id)
    running = [process for process in await table.all() if await _is_alive(sandbox, process, table)]
    return {"processes": [_shown(process) for process in running]}


@router.post("/SendSignal")
async def send_signal(request: Request, sandbox: SandboxOf) -> dict[str, Any]:
    """End a process: the signal is followed by SIGKILL where it is not enough."""
    process = await _find(sandbox, parsed(SignalMessage, await request.body()).process)
    await Table(sandbox.gateway.store, sandbox.record.id).note_killed(process)
    sandbox.caller.session.cancel_task(_task_id(sandbox, process))
    return {}


@router.post("/{method}", include_in_schema=False)
async def not_served(method: str) -> None:
    """Refuse other methods."""
    raise RpcError("unimplemented", f"process.Process/{method} is not served here")


def _action(sandbox: Sandbox, program: Program, session: str) -> Action:
    """Return the action that runs a program in a session of its sandbox."""
    left_s = UNLIMITED_S if program.ends_at is None else max(program.ends_at - program.started_at, 0.001)
    line = shlex.join([program.cmd, *program.args])
    if program.cwd:
        line = f"( cd -- {_folder(program.cwd)} && exec {line} )"
    # Clients wrap commands in a login shell.
    inner = program.args[-1] if len(program.args) > 1 and program.args[-2] == "-c" else line
    return execute(
        sandbox.record.place,
        line,
        session=session,
        timeout_s=left_s,
        queue_timeout_s=None if program.ends_at is None else left_s,
        variables={**sandbox.record.variables, **program.envs},
        action_class=command_class(inner),
        stream=True,
    )


def _folder(path: str) -> str:
    home, slash, rest = path.partition("/")
    return f'"$HOME"{shlex.quote(slash + rest) if slash else ""}' if home == "~" else shlex.quote(path)


async def _attend(handle: Handle[Any], process: Process, table: Table) -> None:
    """Wait for the end of a process, which is at its time limit at the latest, and take its number back."""
    ended = _end_of(handle)
    try:
        limit_s = None if process.program.ends_at is None else process.program.ends_at - time.time()
        await asyncio.wait([ended], timeout=limit_s)
        if not ended.done():
            handle.cancel()
            await ended
    finally:
        await table.remove(process)


async def _settled(handle: Handle[Any]) -> None:
    with suppress(TangramError):
        await asyncio.wrap_future(handle.future)


def _end_of(handle: Handle[Any]) -> asyncio.Task[None]:
    """Return what is done once an action has ended, in whatever way."""
    return asyncio.create_task(_settled(handle))


def _stream(
    request: Request, sandbox: Sandbox, process: Process, handle: Handle[Any], running: asyncio.Task[None] | None
) -> StreamingResponse:
    """Answer with the events of a process."""
    asked = request.headers.get("keepalive-ping-interval", "")
    interval_s = min(float(asked), KEEPALIVE_S) if asked.isdigit() and int(asked) > 0 else KEEPALIVE_S
    limit_s = limit_of(request) if running is None else None

    async def events() -> AsyncIterator[bytes]:
        yield _event("start", pid=process.pid)
        ended: asyncio.Future[None] = asyncio.shield(running) if running is not None else _end_of(handle)
        over_at = time.monotonic() + (UNLIMITED_S if limit_s is None else limit_s)
        # The output of a short command comes with its result, which spares reading the stream.
        await asyncio.wait([ended], timeout=min(SHORT_S, over_at - time.monotonic()))
        output = _Output(sandbox, handle, ended, read=not ended.done())
        try:
            while (part := await output.next(min(interval_s, over_at - time.monotonic()))) is not None:
                yield part
                if time.monotonic() >= over_at:
                    yield end_of_stream(RpcError("deadline_exceeded", "the time limit of the stream is over; the process goes on"))
                    return
        finally:
            ended.cancel()  # the process itself goes on
            await output.close()
        if running is None:  # its own copy of the gateway may have died
            await Table(sandbox.gateway.store, sandbox.record.id).remove(process)
        try:
            result: ExecResult = handle.future.result(0)
        except Exception as error:
            async for part in _failed(request, sandbox, process, error):
                yield part
            return
        for part in _told(result, output):
            yield part

    return StreamingResponse(events(), media_type=STREAM_TYPE)


class _Output:
    """What a command prints while it runs, as events; nothing where its stream is not to be read."""

    def __init__(self, sandbox: Sandbox, handle: Handle[Any], ended: asyncio.Future[None], *, read: bool) -> None:
        """Begin to read."""
        self.is_read = read
        self.dropped = 0
        self._ended = ended
        self._chunks = cast(AsyncGenerator[Chunk, None], sandbox.caller.session.streams.read_async(handle.id))
        self._coming: asyncio.Future[Chunk | None] | None = asyncio.ensure_future(_next_of(self._chunks)) if read else None

    async def next(self, wait_s: float) -> bytes | None:
        """Return the next event, a sign of life after `wait_s` seconds without any; None once the command has ended."""
        waits_for: asyncio.Future[Any] = self._ended if self._coming is None else self._coming
        if not waits_for.done():
            await asyncio.wait([waits_for], timeout=max(0.0, wait_s))
        if not waits_for.done():
            return _event("keepalive")
        if self._coming is None:
            return None
        chunk = self._coming.result()
        if chunk is None:
            self._coming = None
            return await self.next(wait_s)
        self._coming = asyncio.ensure_future(_next_of(self._chunks))
        self.dropped += chunk.dropped
        return _data(chunk.stream, chunk.data)

    async def close(self) -> None:
        """Read no more."""
        if self._coming is not None:
            self._coming.cancel()
            await asyncio.wait([self._coming])
        await self._chunks.aclose()


async def _next_of(chunks: AsyncGenerator[Chunk, None]) -> Chunk | None:
    """Return the next piece of output; None at the end, however the command has ended: its result says that."""
    try:
        return await anext(chunks, None)
    except TangramError:
        return None


def _told(result: ExecResult, output: _Output) -> list[bytes]:
    """Return the events of a command that has ended: its output, unless that was read, and how it ended."""
    parts = []
    for name, text in () if output.is_read else (("stdout", result.stdout), ("stderr", result.stderr)):
        data = text.encode("utf-8", "surrogateescape")
        parts += [_data(name, data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES)]
    if result.exit_code is None:
        return [*parts, end_of_stream(RpcError("deadline_exceeded", result.reason or "the command was ended at its time limit"))]
    end: dict[str, Any] = {"exitCode": result.exit_code, "exited": True, "status": f"exit status {result.exit_code}"}
    if output.dropped if output.is_read else result.truncated:
        end["error"] = "output was dropped: there was more than the nodes let through"
    return [*parts, _event("end", **end), end_of_stream()]


async def _failed(request: Request, sandbox: Sandbox, process: Process, error: Exception) -> AsyncIterator[bytes]:
    """Yield the events of a command that has no result."""
    failure = counted(request, "e2b", classify(error))
    ends_at = process.program.ends_at
    if isinstance(failure, Overloaded | Cancelled) and ends_at is not None and time.time() >= ends_at:
        yield end_of_stream(RpcError("deadline_exceeded", "the command was ended at its time limit"))
    elif not isinstance(failure, Cancelled):
        yield end_of_stream(rpc_error(failure))
    elif await Table(sandbox.gateway.store, sandbox.record.id).was_killed(process):
        yield _event("end", exitCode=-1, exited=False, status=KILLED, error=KILLED)
        yield end_of_stream()
    else:
        # Nobody else ends a command but by closing its sandbox.
        yield end_of_stream(SandboxGone())


async def _find(sandbox: Sandbox, selector: Selector) -> Process:
    """Return a process that runs. Raises `RpcError`."""
    table = Table(sandbox.gateway.store, sandbox.record.id)
    if selector.tag:
        process = next((one for one in await table.all() if one.program.tag == selector.tag), None)
    else:
        process = await table.find(selector.pid)
    if process is None or not await _is_alive(sandbox, process, table):
        raise RpcError("not_found", f"process with {f'tag {selector.tag}' if selector.tag else f'pid {selector.pid}'} not found")
    return process


async def _is_alive(sandbox: Sandbox, process: Process, table: Table) -> bool:
    """Say whether a process runs; one whose copy of the gateway has died without noting its end is removed."""
    if time.time() - process.program.started_at < _SUBMIT_S:
        return True
    known = await sandbox.gateway.journal.action(_task_id(sandbox, process))
    if known is not None and known.status in ("waiting", "running"):
        return True
    await table.remove(process)
    return False


def _task_id(sandbox: Sandbox, process: Process) -> str:
    return sandbox.caller.task_id("cpu.exec", sandbox.record.id, process.key)


def _event(kind: str, **fields: Any) -> bytes:
    return envelope({"event": {kind: fields}})


def _data(stream: str, data: bytes) -> bytes:
    return _event("data", **{stream: base64.b64encode(data).decode("ascii")})


def _shown(process: Process) -> dict[str, Any]:
    program = process.program
    config = {"cmd": program.cmd, "args": program.args, "envs": program.envs} | ({"cwd": program.cwd} if program.cwd else {})
    return {"pid": process.pid, "config": config} | ({"tag": program.tag} if program.tag else {})
