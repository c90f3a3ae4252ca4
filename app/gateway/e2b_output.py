"""What becomes of a process of E2B's, as a stream of events: `start`, `data` as the command prints it, `end`.

`keepalive` is sent while a command waits or prints nothing.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from typing import Any, cast

from fastapi import Request
from fastapi.responses import StreamingResponse

from app.gateway.e2b import RpcError, Sandbox, SandboxGone, end_lost, is_lost, rpc_error
from app.gateway.e2b_connect import STREAM_TYPE, end_of_stream, envelope, limit_of
from app.gateway.e2b_table import Process, Table
from app.gateway.errors import Cancelled, Overloaded, classify
from app.gateway.shape import counted
from tangram.errors import TangramError
from tangram.handles import Handle
from tangram.results import Chunk, ExecResult

KEEPALIVE_S = 20.0
"""Seconds between two signs of life of a stream, unless its client asks for more."""

SHORT_S = 0.03
"""A command that runs for longer has its output sent while it runs."""

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


def stream(
    request: Request, sandbox: Sandbox, process: Process, handle: Handle[Any], running: asyncio.Task[None] | None
) -> StreamingResponse:
    """Answer with the events of a process."""
    asked = request.headers.get("keepalive-ping-interval", "")
    interval_s = min(float(asked), KEEPALIVE_S) if asked.isdigit() and int(asked) > 0 else KEEPALIVE_S
    limit_s = limit_of(request) if running is None else None

    async def events() -> AsyncIterator[bytes]:
        yield _event("start", pid=process.pid)
        ended: asyncio.Future[None] = asyncio.shield(running) if running is not None else end_of(handle)
        over_at = time.monotonic() + (_UNLIMITED_S if limit_s is None else limit_s)
        # The output of a short command comes with its result, which spares reading the stream.
        await asyncio.wait([ended], timeout=min(SHORT_S, over_at - time.monotonic()))
        output = _Output(sandbox, process, handle, ended, read=not ended.done())
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

    def __init__(self, sandbox: Sandbox, process: Process, handle: Handle[Any], ended: asyncio.Future[None], *, read: bool) -> None:
        """Begin to read."""
        self.is_read = read
        self.dropped = 0
        # All that a terminal shows comes as standard output.
        self._names = {"stdout": "stdout" if process.program.terminal is None else "pty", "stderr": "stderr"}
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
        return self.data(chunk.stream, chunk.data)

    def data(self, stream: str, data: bytes) -> bytes:
        """Return the event of some output."""
        return _event("data", **{self._names[stream]: base64.b64encode(data).decode("ascii")})

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
        parts += [output.data(name, data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES)]
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
        if is_lost(failure):
            end_lost(sandbox)
        yield end_of_stream(rpc_error(failure))
    elif await Table(sandbox.gateway.store, sandbox.record.id).was_killed(process):
        yield _event("end", exitCode=-1, exited=False, status=KILLED, error=KILLED)
        yield end_of_stream()
    else:
        # Nobody else ends a command but by closing its sandbox.
        yield end_of_stream(SandboxGone())


def _event(kind: str, **fields: Any) -> bytes:
    return envelope({"event": {kind: fields}})
