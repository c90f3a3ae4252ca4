"""E2B's `/filesystem.Filesystem`: folders and what is known of files, each call a short command in the sandbox.

The commands (`tangram/file_scripts.py`) run where the next command would: in the first session that is free. Relative paths begin at the
work folder.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, cast

from fastapi import Request, Response
from pydantic import BaseModel, Field

from app.gateway import calls
from app.gateway.e2b import RpcError, Sandbox, SandboxOf
from app.gateway.e2b_connect import connect_errors, limit_of, parsed
from app.gateway.errors import classify
from app.gateway.shape import shape_router
from tangram.action import Action
from tangram.calls import execute
from tangram.errors import ActionFailed
from tangram.file_scripts import DEEPEST, EXISTS, INVALID, LIST, MAKE, MISSING, MOVE, REMOVE, STAT, shown, stopped_by
from tangram.results import Chunk, ExecResult

LIMIT_S = 60.0
"""Longest time of one call, seconds, unless its client names a shorter one."""

LISTING_BYTES = 8 * 1024 * 1024
"""Most bytes of a listing that are read, which are some 100,000 entries."""

_CODES = {INVALID: "invalid_argument", MISSING: "not_found", EXISTS: "already_exists"}
_REASONS = {
    "Permission denied": "permission_denied",
    "Operation not permitted": "permission_denied",
    "Read-only file system": "permission_denied",
    "No space left on device": "internal",  # which is no rate limit, as its clients would take `resource_exhausted` for
}
"""What tools say of the files that they were given, besides what is wrong with the call in other ways."""

_KINDS = {"file": "FILE", "folder": "DIRECTORY", "link": "SYMLINK"}

router = shape_router("e2b", connect_errors, prefix="/filesystem.Filesystem", tags=["e2b"])


Path = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]*$")]
"""A path that may exist: Linux knows no longer one, and none with NUL."""


class PathMessage(BaseModel):
    """A message that names a path."""

    path: Path


class ListMessage(PathMessage):
    """Which folder to list, and how deep; 0 is 1. No path is the work folder."""

    path: Path | Literal[""] = ""
    depth: int = Field(1, ge=0, lt=2**32)


class MoveMessage(BaseModel):
    """What to move where."""

    source: Path
    destination: Path


@router.post("/Stat")
async def stat_path(request: Request, sandbox: SandboxOf) -> dict[str, Any]:
    """Say what is at a path."""
    message = parsed(PathMessage, await request.body())
    return {"entry": _entry(await _run(request, sandbox, STAT, message.path))}


@router.post("/ListDir")
async def list_folder(request: Request, sandbox: SandboxOf) -> Response:
    """Say what is in a folder, by path."""
    message = parsed(ListMessage, await request.body())
    listed = await _run(request, sandbox, LIST, message.path or ".", str(min(message.depth or 1, DEEPEST)))
    # Of a large folder this takes seconds, which other calls would wait for.
    return Response(await asyncio.to_thread(lambda: json.dumps({"entries": _entries(listed)})), media_type="application/json")


@router.post("/MakeDir")
async def make_folder(request: Request, sandbox: SandboxOf) -> dict[str, Any]:
    """Make a folder, and those above it."""
    message = parsed(PathMessage, await request.body())
    return {"entry": _entry(await _run(request, sandbox, MAKE, message.path))}


@router.post("/Move")
async def move(request: Request, sandbox: SandboxOf) -> dict[str, Any]:
    """Give a file or a folder another path."""
    message = parsed(MoveMessage, await request.body())
    return {"entry": _entry(await _run(request, sandbox, MOVE, message.source, message.destination))}


@router.post("/Remove")
async def remove(request: Request, sandbox: SandboxOf) -> dict[str, Any]:
    """Remove a file or a folder with all that is in it; one that is not there is removed."""
    message = parsed(PathMessage, await request.body())
    await _run(request, sandbox, REMOVE, message.path)
    return {}


@router.post("/{method}", include_in_schema=False)
async def not_served(method: str) -> None:
    """Refuse watching."""
    raise RpcError("unimplemented", f"filesystem.Filesystem/{method} is not served here: list the folder instead of watching it")


async def _run(request: Request, sandbox: Sandbox, script: str, *words: str) -> str:
    """Run a script in the sandbox. Raises `RpcError` with the code that it says."""
    limit_s = min(limit_of(request) or LIMIT_S, LIMIT_S)
    async with sandbox.processes.unlisted_session() as session:
        *others, last = words
        program = ["sh", "-c", script, "sh", *others]
        action = execute(sandbox.record.place, last, interpreter=program, session=session, timeout_s=limit_s, action_class="e2b-filesystem")
        result: ExecResult = await calls.run(sandbox.caller, action)
        text = result.stdout
        if result.exit_code == 0 and result.truncated:
            result, text = await _streamed(sandbox, replace(action, arguments={**action.arguments, "stream": True}))
    if result.exit_code is None:
        raise RpcError("deadline_exceeded", f"the call was ended after {limit_s:g} s")
    if result.exit_code != 0:
        problem = (result.stderr.strip().splitlines() or [f"exit status {result.exit_code}"])[-1]
        if cause := stopped_by(result.exit_code, result.cause, problem):
            raise classify(ActionFailed(problem, cause))
        raise RpcError(_code(result.exit_code, problem), problem)
    return text


async def _streamed(sandbox: Sandbox, action: Action) -> tuple[ExecResult, str]:
    """Return the result of an action and all that it prints, which the output limit of its node cuts in its result."""
    handle = calls.submit(sandbox.caller, action)
    chunks = cast(AsyncGenerator[Chunk, None], sandbox.caller.session.streams.read_async(handle.id))
    printed = bytearray()
    try:
        while (chunk := await calls.next_chunk(chunks)) is not None:
            printed += chunk.data if chunk.stream == "stdout" else b""
            if chunk.dropped or len(printed) > LISTING_BYTES:
                raise RpcError("out_of_range", f"the folder has more entries than the {LISTING_BYTES >> 20} MiB hold that are listed")
        result: ExecResult = await calls.wait(handle)
    finally:
        handle.cancel()
        await chunks.aclose()
    return result, printed.decode("utf-8", "backslashreplace")


def _code(exit_code: int, problem: str) -> str:
    """Return the code of a script that failed: what it says itself, or what a tool says of the files that it was given."""
    if exit_code in _CODES:
        return _CODES[exit_code]
    return next((code for reason, code in _REASONS.items() if reason in problem), "invalid_argument")


def _entry(text: str) -> dict[str, Any]:
    return _entries(text)[0]


def _entries(text: str) -> list[dict[str, Any]]:
    """Return what a script has shown, in E2B's words."""
    return [
        {
            "name": info.name,
            "type": f"FILE_TYPE_{_KINDS[info.kind]}",
            "path": info.path,
            "size": str(info.size),
            "mode": info.mode,
            "permissions": info.permissions,
            "owner": info.owner,
            "group": info.group,
            "modifiedTime": datetime.fromtimestamp(info.changed_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            **({"isSymlink": True, "symlinkTarget": info.target} if info.kind == "link" else {}),
        }
        for info in shown(text)
    ]
