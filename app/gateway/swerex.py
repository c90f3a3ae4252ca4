"""SWE-ReX 1.4.0, one runtime per environment: `RemoteDeployment(host="http://gateway:port/envs/<environment>", auth_token=token)`.

`<environment>` is the id of an environment that was opened otherwise, or a name of the client's own: the first `create_session` opens an
environment under that name. `close` closes it. `X-Request-ID` is the idempotency key of a call.

| failure | answer |
|---|---|
| the program's: exit code, timeout, syntax, a file that is not there | 511, with the class that SWE-ReX's own server names |
| the environment is not there, or no longer | 511, `DeploymentNotStartedError` |
| the system's, or too much to do for as long as the client waits | 511, `SwerexException`; `extra_info` has `kind` and `cause` |
| a wrong body or token | 400, 401, 413, with `detail` |

What is full is waited for, as the client never calls twice.
"""

from __future__ import annotations

import contextlib
import re
from typing import Annotated

from fastapi import Depends, File, Form, Header, Path, Request, Response, UploadFile
from fastapi.responses import JSONResponse

from app.gateway import rex_models as wire
from app.gateway.context import CallerOf, Gateway, GatewayOf
from app.gateway.errors import BadRequest, GatewayError, NotFound, TooLarge, Unauthorized
from app.gateway.records import Record
from app.gateway.rex_errors import RemoteError, of_failure
from app.gateway.rex_runtime import Runtime, alive, close
from app.gateway.rex_upload import upload
from app.gateway.sessions import Caller
from app.gateway.shape import shape_router

_OPENED_ELSEWHERE = re.compile(r"env-[0-9a-f]{16}")


def answer(_request: Request, error: GatewayError) -> Response:
    """Return a failure as SWE-ReX's client reads it."""
    if isinstance(error, (BadRequest, Unauthorized, TooLarge)):
        return JSONResponse({"detail": str(error)}, error.status)
    remote = error if isinstance(error, RemoteError) else of_failure(error)
    return JSONResponse(remote.content, remote.status)


router = shape_router("swerex", answer, prefix="/envs/{environment}", tags=["swe-rex"])

Environment = Annotated[str, Path(min_length=1, max_length=256)]
Key = Annotated[str | None, Header(alias="X-Request-ID", min_length=1, max_length=256)]


async def find(gateway: Gateway, caller: Caller, environment: str) -> Record:
    """Return the environment of an id, or of a name. Raises `NotFound`."""
    if _OPENED_ELSEWHERE.fullmatch(environment):
        return await gateway.environments.get(caller, environment)
    try:
        return await gateway.environments.find(caller, environment)
    except NotFound:
        return await gateway.environments.get(caller, environment)  # an id that a client has made up


async def _runtime(environment: Environment, caller: CallerOf, gateway: GatewayOf, request: Request, key: Key = None) -> Runtime:
    return Runtime(gateway, caller, await find(gateway, caller, environment), key, request)


RuntimeOf = Annotated[Runtime, Depends(_runtime)]


@router.get("/is_alive")
async def is_alive(environment: Environment, caller: CallerOf, gateway: GatewayOf) -> wire.Alive:
    """Say whether the environment stands."""
    try:
        return await alive(gateway, await find(gateway, caller, environment))
    except NotFound as error:
        return wire.Alive(is_alive=False, message=str(error))


@router.post("/create_session")
async def create_session(
    environment: Environment, body: wire.CreateSession, caller: CallerOf, gateway: GatewayOf, request: Request, key: Key = None
) -> wire.SessionStarted:
    """Start a shell; opens the environment where there is none of this name."""
    record = await _stood(environment, caller, gateway, request)
    return await Runtime(gateway, caller, record, key, request).create_session(body)


async def _stood(environment: str, caller: Caller, gateway: Gateway, request: Request) -> Record:
    """Return an environment that stands, opened where there is none of this name; an opening is joined, as who began it may be gone."""
    is_named = not _OPENED_ELSEWHERE.fullmatch(environment)
    try:
        record = await find(gateway, caller, environment)
        if record.state == "open" or not is_named:
            return record
    except NotFound:
        if not is_named:
            raise
    return await gateway.environments.open(caller, name=environment, owner="swe-rex", request=request)


@router.post("/run_in_session")
async def run_in_session(body: wire.SessionAction, runtime: RuntimeOf) -> wire.Observation:
    """Run a command in a shell, or interrupt one."""
    return await (runtime.interrupt(body) if isinstance(body, wire.BashInterrupt) else runtime.run(body))


@router.post("/close_session")
async def close_session(body: wire.CloseSession, runtime: RuntimeOf) -> wire.SessionClosed:
    """End a shell."""
    return await runtime.close_session(body)


@router.post("/execute")
async def execute(body: wire.Command, runtime: RuntimeOf) -> wire.CommandDone:
    """Run a program beside all shells."""
    return await runtime.execute(body)


@router.post("/read_file")
async def read_file(body: wire.ReadFile, runtime: RuntimeOf) -> wire.FileRead:
    """Return a text file."""
    return await runtime.read_file(body)


@router.post("/write_file")
async def write_file(body: wire.WriteFile, runtime: RuntimeOf) -> wire.Done:
    """Write a text file, with the folders above it."""
    await runtime.write_file(body.path, body.content.encode("utf-8", "surrogatepass"))
    return wire.Done()


@router.post("/upload")
async def upload_file(
    runtime: RuntimeOf,
    file: Annotated[UploadFile, File()],
    target_path: Annotated[str, Form(min_length=1)],
    unzip: Annotated[bool, Form()] = False,
) -> wire.Done:
    """Write a file, or the files of an archive."""
    await upload(runtime, file, target_path, unzip=unzip)
    return wire.Done()


@router.post("/close")
async def close_runtime(environment: Environment, caller: CallerOf, gateway: GatewayOf) -> wire.Done:
    """Close the environment; one that is gone already is closed."""
    with contextlib.suppress(NotFound):
        await close(gateway, caller, await find(gateway, caller, environment))
    return wire.Done()
