"""The Connect protocol with JSON, as far as E2B's clients use it.

A streamed message is an envelope: one byte of flags, the length in four bytes, big-endian, and the message. The last envelope of an answer
has the flag `END` and says whether the call has failed. Requests name their time limit in milliseconds.
"""

from __future__ import annotations

import json
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from app.gateway.e2b import RpcError, SandboxGone, data_errors, rpc_error
from app.gateway.errors import GatewayError, Unauthorized
from app.gateway.shape import LARGE_BODY, may_be_large

STREAM_TYPE = "application/connect+json"
"""Content type of streams."""

END = 0b10
_COMPRESSED = 0b01
_MOST_DIGITS = 10
_HEAD = struct.Struct(">BI")

M = TypeVar("M", bound=BaseModel)
BeforeLarge = Callable[[], Awaitable[object]]


def envelope(message: Mapping[str, Any], flags: int = 0) -> bytes:
    """Return a message as it travels in a stream."""
    data = json.dumps(message, separators=(",", ":")).encode()
    return _HEAD.pack(flags, len(data)) + data


def end_of_stream(error: RpcError | None = None) -> bytes:
    """Return the last envelope of an answer."""
    return envelope({} if error is None else {"error": {"code": error.code, "message": str(error)}}, END)


def connect_errors(request: Request, error: GatewayError) -> Response:
    """Answer a call that has failed. The protocol has a streamed call fail in its last envelope, with the status 200.

    Two answers keep their status, since at E2B they come from in front of the sandbox: it is gone, and the token does not count.
    """
    answer, known = data_errors(request, error), rpc_error(error)
    if isinstance(known, SandboxGone) or isinstance(error, Unauthorized) or not is_streamed(request):
        return answer
    return Response(end_of_stream(known), media_type=STREAM_TYPE, headers=dict(error.headers))


def is_streamed(request: Request) -> bool:
    """Say whether the messages of a call are in envelopes."""
    return request.headers.get("content-type", "").startswith(STREAM_TYPE)


async def envelopes(request: Request, before_large: BeforeLarge | None = None) -> AsyncIterator[bytes]:
    """Yield the messages of a streamed request as they come. Raises `RpcError` for what is no envelope, and as `before_large`."""
    held, got = bytearray(), 0
    async for part in request.stream():
        held += part
        got += len(part)
        if before_large is not None and got > LARGE_BODY:
            await before_large()
            before_large = None
        while len(held) >= _HEAD.size:
            flags, length = _HEAD.unpack_from(held)
            if flags & _COMPRESSED:
                raise RpcError("unimplemented", "compressed messages are not served here")
            if len(held) < _HEAD.size + length:
                break
            message = bytes(held[_HEAD.size : _HEAD.size + length])
            del held[: _HEAD.size + length]
            yield message
    if held:
        raise RpcError("invalid_argument", "the last message of the request is cut")


async def only_message(request: Request, before_large: BeforeLarge | None = None) -> bytes:
    """Return the one message of a request, which is streamed or not.

    `before_large` is awaited before more of it than about `LARGE_BODY` is read. Raises as that, and `RpcError`.
    """
    if not is_streamed(request):
        if before_large is not None and may_be_large(request.headers):
            await before_large()
        return await request.body()
    messages = [message async for message in envelopes(request, before_large)]
    if len(messages) != 1:
        raise RpcError("invalid_argument", f"the request must have one message, not {len(messages)}")
    return messages[0]


def parsed(kind: type[M], raw: bytes) -> M:
    """Return a message as a value. Raises `RpcError`."""
    try:
        return kind.model_validate_json(raw or b"{}")
    except ValidationError as error:
        first = error.errors()[0]
        raise RpcError("invalid_argument", f"{'.'.join(str(step) for step in first['loc'])}: {first['msg']}") from None


def limit_of(request: Request) -> float | None:
    """Return the time limit of a call, seconds; None where it has none. Raises `RpcError`."""
    named = request.headers.get("connect-timeout-ms")
    if named is None:
        return None
    limit_ms = whole_number(named)
    if limit_ms is None:
        raise RpcError("invalid_argument", f"Connect-Timeout-Ms: not a number of milliseconds: {named[:40]!r}")
    return limit_ms / 1000


def whole_number(text: str) -> int | None:
    """Return a whole number of a header or a URL; None where it is none in at most ten ASCII digits. `int` refuses some that are digits."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS else None
