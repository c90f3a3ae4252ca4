"""ROCK 1.11.0 (`rl-rock`), `/apis/envs/sandbox/v1`: SWE-ReX's verbs, with the sandbox's id in the body and the result in an envelope.

A token comes as `XRL-Authorization: Bearer`, or as for other shapes. `start_async` begins to open a sandbox and returns. `get_status` says
when it stands. A sandbox that is not used for `auto_clear_time_minutes` is closed.

| answer | means |
|---|---|
| `{"status": "Success", "result": …}` | done |
| `{"status": "Failed", "error": …, "result": {"code": 4000}}` | the caller's affair |
| the same with code 5000 | the system failed |
| the same with code 6000 | the command failed, took too long or is no shell text; a file cannot be used |

Failures have status 200, but for a wrong token (401) and a body that is too large (413).
"""

from __future__ import annotations

import asyncio
import math
import re
import time
import uuid
from collections.abc import Mapping
from typing import Annotated, Any, Unpack

from fastapi import Body, Depends, File, Form, Header, Query, Request, Response, UploadFile
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from redis import RedisError

from app.gateway import rex_models as wire
from app.gateway.context import Gateway, GatewayOf
from app.gateway.errors import BadRequest, GatewayError, InfraFailed, NotFound, ProgramFailed, TooLarge, Unauthorized, classify
from app.gateway.records import MOST_CPUS, Record, Wanted
from app.gateway.rex_errors import RemoteError
from app.gateway.rex_runtime import Runtime, alive, close
from app.gateway.rex_upload import upload
from app.gateway.sessions import Caller, digest
from app.gateway.shape import shape_router
from app.gateway.tokens import token_of
from tangram.action import LONGEST_S
from tangram.errors import TangramError

BAD_REQUEST, SERVER_ERROR, COMMAND_ERROR = 4000, 5000, 6000

START_PATIENCE_S = 2.0
"""How long `start_async` waits for the sandbox; a client that finds it up need not sleep before it asks again."""

FAILED_KEPT_S = 3600
_FAILED = "tangram-gw-rock-failed-"
_RENEW_AT = 0.9
_MEMORY = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)([bkmgt]?)(?:i?b)?")
_MB = {"": 2**-20, "b": 2**-20, "k": 2**-10, "m": 1.0, "g": 2.0**10, "t": 2.0**20}

Cores = Annotated[float, Field(gt=0, le=MOST_CPUS)]
Id = Annotated[str, Field(min_length=1, max_length=256)]


def answer(_request: Request, error: GatewayError) -> Response:
    """Return a failure in ROCK's envelope."""
    if isinstance(error, (RemoteError, ProgramFailed)):
        code = COMMAND_ERROR
    else:
        code = BAD_REQUEST if isinstance(error, (BadRequest, NotFound, TooLarge, Unauthorized)) else SERVER_ERROR
    status = error.status if isinstance(error, (TooLarge, Unauthorized)) else 200
    result = {"code": code, "exit_code": None, "failure_reason": str(error)}
    return JSONResponse({"status": "Failed", "message": error.kind, "error": str(error), "result": result}, status)


class Start(BaseModel):
    """What a sandbox is to be; times in minutes and seconds, as their names say."""

    image: Annotated[str, Field(min_length=1)]
    sandbox_id: Id | None = None
    auto_clear_time_minutes: Annotated[int, Field(gt=0, le=int(LONGEST_S) // 60)] = 30
    memory: str = "8g"
    cpus: Cores = 2
    limit_cpus: Cores | None = None
    num_gpus: float | None = None


class CreateSession(wire.CreateSession):
    """A new shell of a sandbox."""

    sandbox_id: Id
    remote_user: str | None = None


class BashAction(wire.BashAction):
    """A command for a shell of a sandbox."""

    sandbox_id: Id


class CloseSession(wire.CloseSession):
    """The end of a shell of a sandbox."""

    sandbox_id: Id


class Command(wire.Command):
    """A program in a sandbox."""

    sandbox_id: Id
    timeout: wire.Seconds = 1200.0


class ReadFile(wire.ReadFile):
    """A text file of a sandbox to read."""

    sandbox_id: Id


class WriteFile(wire.WriteFile):
    """A text file of a sandbox to write."""

    sandbox_id: Id


class Written(BaseModel):
    """A file is written."""

    success: bool = True
    message: str = ""
    file_name: str = ""


def _token_of(headers: Mapping[str, str]) -> str:
    return headers.get("xrl-authorization", "").removeprefix("Bearer ").strip() or token_of(headers)


router = shape_router("rock", answer, token_of=_token_of, prefix="/apis/envs/sandbox/v1", tags=["rock"])


async def _caller(request: Request, gateway: GatewayOf) -> Caller:
    caller = await gateway.caller(_token_of(request.headers))
    request.state.job = caller.job
    return caller


class Sandboxes:
    """The sandboxes of a caller, for one request."""

    def __init__(self, request: Request, gateway: GatewayOf, caller: Annotated[Caller, Depends(_caller)]) -> None:
        self.request, self.gateway, self.caller = request, gateway, caller
        self._key = request.headers.get("x-request-id")

    async def runtime(self, sandbox: str, for_s: float = 0.0) -> Runtime:
        """Return the verbs of a sandbox, whose time without use begins anew after a call of `for_s` seconds. Raises `NotFound`."""
        record = await self.gateway.environments.find(self.caller, sandbox)
        if record.lease_s is not None and record.ends_at is not None and record.ends_at - time.time() < for_s + _RENEW_AT * record.lease_s:
            record = await self.gateway.environments.extend(self.caller, record.id, record.lease_s, for_s)
        return Runtime(self.gateway, self.caller, record, self._key, self.request)

    def longest(self, body: BashAction | Command) -> float:
        """Return for how many seconds a command may run."""
        return body.timeout if body.timeout is not None else self.gateway.settings.timeout_s

    def begin(self, sandbox: str, **wanted: Unpack[Wanted]) -> asyncio.Task[Record]:
        """Open a sandbox, beside the calls, unless this process does so already; another one's opening is joined."""
        starts = _starts_of(self.request)
        where = self.caller.job, sandbox

        def forget(task: asyncio.Task[Record]) -> None:
            del starts[where]
            if not task.cancelled():
                task.exception()  # Kept where others look; asyncio need not complain that nobody did.

        if where not in starts:
            starts[where] = asyncio.create_task(_open(self.gateway, self.caller, {**wanted, "name": sandbox, "owner": "rock"}))
            starts[where].add_done_callback(forget)
        return starts[where]


SandboxesOf = Annotated[Sandboxes, Depends(Sandboxes)]


def _starts_of(request: Request) -> dict[tuple[str, str], asyncio.Task[Record]]:
    """Return the openings of this process that go on, by job and sandbox."""
    starts: dict[tuple[str, str], asyncio.Task[Record]] | None = getattr(request.app.state, "rock_starts", None)
    if starts is None:
        starts = request.app.state.rock_starts = {}
    return starts


async def _open(gateway: Gateway, caller: Caller, wanted: Wanted) -> Record:
    """Open a sandbox; why that failed is kept for those who ask."""
    failed = _FAILED + digest(caller.job, wanted["name"])
    try:
        await gateway.store.delete(failed)
        return await gateway.environments.open(caller, **wanted)
    except (TangramError, RedisError) as error:
        try:
            await gateway.store.set(failed, str(classify(error)), ex=FAILED_KEPT_S)
        except RedisError as unkept:
            raise InfraFailed(f"{error}; {unkept}", "stack_unreachable") from error
        raise


def _done(result: BaseModel | dict[str, Any] | str) -> dict[str, Any]:
    content = result.model_dump() if isinstance(result, BaseModel) else result
    return {"status": "Success", "message": None, "error": None, "result": content}


@router.post("/start_async")
async def start_async(body: Start, sandboxes: SandboxesOf, user: Annotated[str, Header(alias="X-User-Id")] = "") -> dict[str, Any]:
    """Begin to open a sandbox. Those with GPUs are refused: models are services here."""
    if body.num_gpus:
        raise BadRequest("num_gpus: a sandbox has no GPUs; models are asked as services")
    sandbox, memory_mb = body.sandbox_id or uuid.uuid4().hex, _memory_mb(body.memory)
    cpus = max(1, math.ceil(body.limit_cpus or body.cpus))
    metadata = {"cpus": str(cpus), "memory": body.memory, "user_id": user}
    lease_s = body.auto_clear_time_minutes * 60.0
    opening = sandboxes.begin(sandbox, image=body.image, memory_mb=memory_mb, cpus=cpus, metadata=metadata, lease_s=lease_s)
    await asyncio.wait([opening], timeout=START_PATIENCE_S)
    if opening.done():
        await opening
    return _done({"sandbox_id": sandbox, "host_name": "tangram", "host_ip": None, "cpus": body.cpus, "memory": body.memory})


@router.get("/get_status")
async def get_status(sandbox_id: Annotated[Id, Query()], sandboxes: SandboxesOf) -> dict[str, Any]:
    """Say how a sandbox is."""
    return _done(await _status(sandbox_id, sandboxes))


@router.get("/is_alive")
async def is_alive(sandbox_id: Annotated[Id, Query()], sandboxes: SandboxesOf) -> dict[str, Any]:
    """Say whether a sandbox stands."""
    try:
        return _done(await alive(sandboxes.gateway, await sandboxes.gateway.environments.find(sandboxes.caller, sandbox_id)))
    except NotFound as error:
        return _done(wire.Alive(is_alive=False, message=str(error)))


@router.post("/create_session")
async def create_session(body: CreateSession, sandboxes: SandboxesOf) -> dict[str, Any]:
    """Start a shell."""
    if body.remote_user:
        raise BadRequest("remote_user: shells run as the sandbox's one user")
    return _done(await (await sandboxes.runtime(body.sandbox_id, body.startup_timeout or 0.0)).create_session(body))


@router.post("/run_in_session")
async def run_in_session(body: BashAction, sandboxes: SandboxesOf) -> dict[str, Any]:
    """Run a command in a shell."""
    return _done(await (await sandboxes.runtime(body.sandbox_id, sandboxes.longest(body))).run(body))


@router.post("/close_session")
async def close_session(body: CloseSession, sandboxes: SandboxesOf) -> dict[str, Any]:
    """End a shell."""
    return _done(await (await sandboxes.runtime(body.sandbox_id)).close_session(body))


@router.post("/execute")
async def execute(body: Command, sandboxes: SandboxesOf) -> dict[str, Any]:
    """Run a program beside all shells."""
    return _done(await (await sandboxes.runtime(body.sandbox_id, sandboxes.longest(body))).execute(body))


@router.post("/read_file")
async def read_file(body: ReadFile, sandboxes: SandboxesOf) -> dict[str, Any]:
    """Return a text file."""
    return _done(await (await sandboxes.runtime(body.sandbox_id)).read_file(body))


@router.post("/write_file")
async def write_file(body: WriteFile, sandboxes: SandboxesOf) -> dict[str, Any]:
    """Write a text file."""
    await (await sandboxes.runtime(body.sandbox_id)).write_file(body.path, body.content.encode("utf-8", "surrogatepass"))
    return _done(Written())


@router.post("/upload")
async def upload_file(
    file: Annotated[UploadFile, File()],
    target_path: Annotated[str, Form(min_length=1)],
    sandbox_id: Annotated[Id, Form()],
    sandboxes: SandboxesOf,
) -> dict[str, Any]:
    """Write a file of any kind."""
    await upload(await sandboxes.runtime(sandbox_id), file, target_path, unzip=False)
    return _done(Written(file_name=file.filename or ""))


@router.post("/stop")
@router.post("/delete")
async def stop(sandbox_id: Annotated[Id, Body(embed=True)], sandboxes: SandboxesOf) -> dict[str, Any]:
    """Close a sandbox; one that is gone already is closed."""
    try:
        record = await sandboxes.gateway.environments.find(sandboxes.caller, sandbox_id)
    except NotFound:
        return _done(f"{sandbox_id} was stopped before")
    await close(sandboxes.gateway, sandboxes.caller, record)
    return _done(f"{sandbox_id} stopped")


async def _status(sandbox: str, sandboxes: Sandboxes) -> dict[str, Any]:
    """Return ROCK's description of a sandbox. Raises `NotFound` for one that was never started, or is gone."""
    gateway, caller = sandboxes.gateway, sandboxes.caller
    try:
        record = await gateway.environments.find(caller, sandbox)
    except NotFound:
        reason = await gateway.store.get(_FAILED + digest(caller.job, sandbox))
        if reason is None:
            raise
        message = reason.decode() if isinstance(reason, bytes) else str(reason)
        return {"sandbox_id": sandbox, "is_alive": False, "status": {"open": {"status": "failed", "message": message}}}
    if record.state == "opening":
        # The process that began it may be gone.
        sandboxes.begin(sandbox, **record.model_dump(include={"image", "memory_mb", "cpus", "metadata", "lease_s"}))
    seen = await alive(gateway, record)
    stage = {"status": "running" if record.state == "opening" else "success" if seen else "failed", "message": seen.message}
    return {
        "sandbox_id": sandbox,
        "is_alive": seen.is_alive,
        "state": "running" if seen.is_alive else "pending" if record.state == "opening" else "stopped",
        "status": {"open": stage},
        "host_name": "tangram",
        "image": record.image,
        "cpus": float(record.metadata.get("cpus", "1")),
        "memory": record.metadata.get("memory"),
        "user_id": record.metadata.get("user_id") or None,
        "port_mapping": {},
    }


def _memory_mb(memory: str) -> int:
    found = _MEMORY.fullmatch(memory.strip().lower())
    if found is None:
        raise BadRequest(f"memory: must be an amount such as 8g, not {memory!r}")
    return max(1, math.ceil(float(found[1]) * _MB[found[2]]))
