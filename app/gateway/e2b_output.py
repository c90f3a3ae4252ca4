"""What becomes of a process of E2B's, as a stream of events: `start`, `data` as the command prints it, `end`.

`keepalive` is sent while a command waits or prints nothing. A command that ends within `SHORT_S` is answered at once and whole, with the
output that is in its result. That is most commands, and spares them a reader of their stream and several sends.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from typing import Any, cast

from fastapi import Request
from fastapi.responses import Response, StreamingResponse

from app.gateway import calls
from app.gateway.e2b import RpcError, Sandbox, SandboxGone, end_lost, rpc_error
from app.gateway.e2b_connect import STREAM_TYPE, end_of_stream, envelope, limit_of, whole_number
from app.gateway.e2b_table import Process
from app.gateway.errors import Cancelled, InfraFailed, Overloaded, Unauthorized, classify
from app.gateway.shape import counted
from tangram.errors import TangramError
from tangram.handles import Handle
from tangram.results import Chunk, ExecResult

KEEPALIVE_S = 20.0
"""Seconds between two signs of life of a stream, unless its client asks for more."""

SHORT_S = 0.1
"""A command that takes longer, its wait in the queue included, is answered with `start`, and its output is sent while it runs."""

CHUNK_BYTES = 128 * 1024
"""Most output in one message."""

KILLED = "signal: killed"

_UNLIMITED_S = 1e9


async def _settled(handle: Handle[Any]) -> None:
    with suppress(TangramError):
        await asyncio.wrap_future(handle.future)


def end_of(handle: Handle[Any]) -> asyncio.Task[None]:
    """Return what is done once an action has ended, in whatever way."""
    return asyncio.create_task(_settled(handle))


async def answer(request: Request, sandbox: Sandbox, process: Process, handle: Handle[Any], own: asyncio.Future[None] | None) -> Response:
    """Answer with the events of a process; `own` is done once it has ended, where the call has started it and somebody notes its end."""
    interval_s = min(whole_number(request.headers.get("keepalive-ping-interval", "")) or KEEPALIVE_S, KEEPALIVE_S)
    limit_s = limit_of(request) if own is None else None
    over_at = time.monotonic() + (_UNLIMITED_S if limit_s is None else limit_s)
    ended: asyncio.Future[None] = asyncio.shield(own) if own is not None else end_of(handle)
    if not process.program.is_interactive:
        await asyncio.wait([ended], timeout=min(SHORT_S, over_at - time.monotonic()))
    if ended.done():
        if own is None:
            await sandbox.processes.end(process)
        parts = [part async for part in _end(request, sandbox, process, handle, None)]
        return Response(b"".join([_event("start", pid=process.pid), *parts]), media_type=STREAM_TYPE)

    async def events() -> AsyncIterator[bytes]:
        yield _event("start", pid=process.pid)
        output = _Output(sandbox, process, handle, ended)
        try:
            while (part := await output.next(min(interval_s, over_at - time.monotonic()))) is not None:
                if await _is_revoked(sandbox):
                    yield end_of_stream(RpcError("unauthenticated", "the tokens of the job were revoked; the process goes on"))
                    return
                yield part
                if time.monotonic() >= over_at:
                    yield end_of_stream(RpcError("deadline_exceeded", "the time limit of the stream is over; the process goes on"))
                    return
        finally:
            ended.cancel()  # the process itself goes on
            await output.close()
        if own is None:  # its own copy of the gateway may have died
            await sandbox.processes.end(process)
        async for part in _end(request, sandbox, process, handle, output):
            yield part

    return StreamingResponse(events(), media_type=STREAM_TYPE)


async def _is_revoked(sandbox: Sandbox) -> bool:
    """Say whether the tokens of the job were revoked while the stream is open. Where nobody can look, it goes on."""
    try:
        await sandbox.gateway.tokens.check(sandbox.record.job)
    except Unauthorized:
        return True
    except InfraFailed:
        return False
    return False


async def _end(request: Request, sandbox: Sandbox, process: Process, handle: Handle[Any], output: _Output | None) -> AsyncIterator[bytes]:
    """Yield the last events of a process that has ended; `output` is where what it printed was read, if it was."""
    try:
        result: ExecResult = handle.future.result(0)
    except Exception as error:
        async for part in _failed(request, sandbox, process, error):
            yield part
        return
    for part in _told(result, process, output):
        yield part


class _Output:
    """What a command prints while it runs, as events."""

    def __init__(self, sandbox: Sandbox, process: Process, handle: Handle[Any], ended: asyncio.Future[None]) -> None:
        self.dropped = 0
        self._process, self._ended = process, ended
        self._chunks = cast(AsyncGenerator[Chunk, None], sandbox.caller.session.streams.read_async(handle.id))
        self._coming: asyncio.Future[Chunk | None] | None = asyncio.ensure_future(calls.next_chunk(self._chunks))

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
        self._coming = asyncio.ensure_future(calls.next_chunk(self._chunks))
        self.dropped += chunk.dropped
        return _data(self._process, chunk.stream, chunk.data)

    async def close(self) -> None:
        if self._coming is not None:
            self._coming.cancel()
            await asyncio.wait([self._coming])
        await self._chunks.aclose()


def _told(result: ExecResult, process: Process, output: _Output | None) -> list[bytes]:
    """Return the events of a command that has ended: its output, unless that was read, and how it ended."""
    parts = []
    for name, text in (("stdout", result.stdout), ("stderr", result.stderr)) if output is None else ():
        data = text.encode("utf-8", "surrogateescape")
        parts += [_data(process, name, data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES)]
    if result.exit_code is None:
        return [*parts, end_of_stream(RpcError("deadline_exceeded", result.reason or "the command was ended at its time limit"))]
    end: dict[str, Any] = {"exitCode": result.exit_code, "exited": True, "status": f"exit status {result.exit_code}"}
    missing = f"{output.dropped} bytes of output are missing: nobody has read on for too long" if output and output.dropped else ""
    if error := "; ".join(filter(None, (result.remark if output is None else result.reason, missing))):
        end["error"] = error
    return [*parts, _event("end", **end), end_of_stream()]


async def _failed(request: Request, sandbox: Sandbox, process: Process, error: Exception) -> AsyncIterator[bytes]:
    """Yield the events of a command that has no result."""
    failure = counted(request, "e2b", classify(error))
    ends_at = process.program.ends_at
    if isinstance(failure, Overloaded | Cancelled) and ends_at is not None and time.time() >= ends_at:
        yield end_of_stream(RpcError("deadline_exceeded", "the command was ended at its time limit"))
    elif not isinstance(failure, Cancelled):
        if failure.environment_lost:
            end_lost(sandbox)
        yield end_of_stream(rpc_error(failure))
    elif await sandbox.processes.was_killed(process):
        yield _event("end", exitCode=-1, exited=False, status=KILLED, error=KILLED)
        yield end_of_stream()
    else:
        # Nobody else ends a command but by closing its sandbox.
        yield end_of_stream(SandboxGone())


def _data(process: Process, stream: str, data: bytes) -> bytes:
    """Return the event of some output; all that a terminal shows comes as standard output."""
    name = "pty" if stream == "stdout" and process.program.terminal is not None else stream
    return _event("data", **{name: base64.b64encode(data).decode("ascii")})


def _event(kind: str, **fields: Any) -> bytes:
    return envelope({"event": {kind: fields}})
