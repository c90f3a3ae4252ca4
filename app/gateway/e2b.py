"""What the routes of E2B's data plane share: which sandbox a request is for, and how a failure is said in the words of E2B's clients.

A request names its sandbox by the header `E2b-Sandbox-Id`, or by a host name `49983-<sandbox>.<domain>`. The token that was handed out
with the sandbox, in `X-Access-Token`, gives access to that sandbox alone.

| failure | calls of `/process.Process` and `/filesystem.Filesystem` | `/files` | what the client raises |
|---|---|---|---|
| the sandbox is gone | 502, "… was not found" | the same | `SandboxNotRunningException` |
| a wrong token | `unauthenticated` | 401 | `AuthenticationException` |
| a wrong request | `invalid_argument` | 400 | `InvalidArgumentException` |
| a file that the sandbox's user may not change | `permission_denied` | 400 | `SandboxException` |
| no such file or process | `not_found` | 404 | `FileNotFoundException`, `NotFoundException` |
| no room for a file; what programs do to the tools of a call | `internal` | 507, 500 | `SandboxException`, `NotEnoughSpaceException` |
| a queue is full | `resource_exhausted` | 429 | `RateLimitException` |
| the system failed | `unavailable` | 503 | `SandboxUnreachableException`, `SandboxException` |

A program that fails is no error: its exit code says so.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends
from starlette.requests import Request
from starlette.responses import JSONResponse

from app.gateway import calls
from app.gateway.context import Gateway, gateway_of
from app.gateway.e2b_table import Table
from app.gateway.errors import (
    BadRequest,
    Cancelled,
    GatewayError,
    InfraFailed,
    NotFound,
    Overloaded,
    ProgramFailed,
    TooLarge,
    Unauthorized,
)
from app.gateway.records import Record
from app.gateway.sessions import Caller
from tangram.calls import close_environment
from tangram.errors import TangramError

ENVD_VERSION = "0.5.7"
"""The version of E2B's own agent whose calls are served here; clients leave out what came later."""

GONE = "The sandbox was not found"
"""Clients look for the last three words."""

STATUS_OF = {
    "invalid_argument": 400,
    "out_of_range": 400,
    "unauthenticated": 401,
    "permission_denied": 403,
    "not_found": 404,
    "failed_precondition": 400,
    "already_exists": 409,
    "resource_exhausted": 429,
    "canceled": 499,
    "internal": 500,
    "unimplemented": 501,
    "unavailable": 503,
    "deadline_exceeded": 504,
}
"""The HTTP status of each code of the Connect protocol."""

_ending: set[asyncio.Task[None]] = set()
_HOST = re.compile(r"49983-(env-[0-9a-f]+)\.")


class RpcError(GatewayError):
    """Raised for a call that fails with a code of the Connect protocol."""

    def __init__(self, code: str, message: str) -> None:
        """Keep the code, a key of `STATUS_OF`, and a message of one line."""
        super().__init__(message)
        self.code = code
        self.status = STATUS_OF[code]


class SandboxGone(RpcError):
    """Raised when the sandbox was never there for this caller, or is there no longer."""

    def __init__(self) -> None:
        super().__init__("unavailable", GONE)


@dataclass(frozen=True, slots=True)
class Sandbox:
    """A sandbox and for whom it is used."""

    record: Record
    caller: Caller
    gateway: Gateway

    @property
    def processes(self) -> Table:
        """What runs in it."""
        return self.gateway.tables.of(self.record.id)


def rpc_error(error: GatewayError) -> RpcError:
    """Return a failure with the code that clients understand."""
    text = str(error)
    match error:
        case RpcError():
            return error
        case NotFound():
            return SandboxGone()
        case InfraFailed() | ProgramFailed() if error.environment_lost:
            return SandboxGone()
        case InfraFailed():
            return RpcError("unavailable", text)
        case BadRequest():
            return RpcError("invalid_argument", text)
        case Unauthorized():
            return RpcError("unauthenticated", text)
        case Overloaded() | TooLarge():
            return RpcError("resource_exhausted", text)
        case Cancelled():
            return RpcError("canceled", text)
    return RpcError("internal", text)


def control_errors(_request: Request, error: GatewayError) -> JSONResponse:
    """Answer a call of the control plane that has failed."""
    return JSONResponse({"code": error.status, "message": str(error)}, error.status, dict(error.headers))


def data_errors(request: Request, error: GatewayError) -> JSONResponse:
    """Answer a call of the data plane that has failed."""
    known = rpc_error(error)
    if error.environment_lost and (sandbox := getattr(request.state, "sandbox", None)) is not None:
        end_lost(sandbox)
    if isinstance(known, SandboxGone):
        return JSONResponse({"code": 502, "message": GONE, "sandboxId": sandbox_id_of(request)}, 502)
    status = error.status if isinstance(error, TooLarge) else 507 if error.cause == "disk_limit" else known.status
    code = status if request.url.path == "/files" else known.code
    return JSONResponse({"code": code, "message": str(known)}, status, dict(error.headers))


def end_lost(sandbox: Sandbox) -> None:
    """Have a sandbox that has ended by itself closed, so that it is known to be gone; does not wait for that, and keeps its record."""

    async def close() -> None:
        with suppress(TangramError):  # somebody else has closed it, or its lease will
            await calls.run(sandbox.caller, close_environment(sandbox.record.place))

    task = asyncio.create_task(close())
    _ending.add(task)
    task.add_done_callback(_ending.discard)


def sandbox_id_of(request: Request) -> str:
    """Return the id of the sandbox that a request is for; empty where it names none."""
    named = request.headers.get("e2b-sandbox-id")
    if named is None and (host := _HOST.match(request.headers.get("host", ""))):
        named = host[1]
    return named or ""


def named_sandbox(request: Request) -> str:
    """Return the id of the sandbox that a request is for. Raises `RpcError` where it names none."""
    if not (named := sandbox_id_of(request)):
        raise RpcError("invalid_argument", "the header E2b-Sandbox-Id is to name the sandbox")
    return named


def access_token_of(request: Request) -> str:
    """Return the token of a sandbox that a request comes with; empty where it has none."""
    return request.headers.get("x-access-token", "")


async def find_sandbox(request: Request) -> Sandbox:
    """Return the sandbox that a request is for, whoever asks: its token is still to be checked.

    Raises `SandboxGone`, and `Unauthorized` where all tokens of its job were revoked.
    """
    gateway = await gateway_of(request)
    return await _with_caller(gateway, await gateway.records.read(named_sandbox(request)))


async def _with_caller(gateway: Gateway, record: Record | None) -> Sandbox:
    """Return the sandbox of a record. Raises as `find_sandbox`."""
    if record is None or record.state != "open":
        raise SandboxGone()
    await gateway.tokens.check(record.job)
    return Sandbox(record, await gateway.sessions.caller(record.job), gateway)


async def sandbox_of(request: Request) -> Sandbox:
    """Return the sandbox that a request is for, by its token. Raises `SandboxGone` and `Unauthorized`."""
    return _checked(request, await find_sandbox(request))


async def checked_sandbox(request: Request, record: Record | None) -> Sandbox:
    """Return the sandbox of a record, if the request may use it. Raises as `sandbox_of`."""
    return _checked(request, await _with_caller(await gateway_of(request), record))


def _checked(request: Request, sandbox: Sandbox) -> Sandbox:
    """Return a sandbox whose token the request has. Raises `Unauthorized`."""
    if not secrets.compare_digest(access_token_of(request).encode(), sandbox.record.access_token.encode()):
        raise Unauthorized("X-Access-Token is not the token of this sandbox")
    admit(request, sandbox)
    return sandbox


def admit(request: Request, sandbox: Sandbox) -> None:
    """Note whose request it is, once that is known."""
    request.state.job, request.state.sandbox = sandbox.record.job, sandbox


SandboxOf = Annotated[Sandbox, Depends(sandbox_of)]
