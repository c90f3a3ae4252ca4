"""E2B's `/filesystem.Filesystem`: folders and what is known of files, each call a short command in the sandbox.

The commands are POSIX shell with `find`, `stat` and `readlink`, as GNU and BusyBox have them. What they show are records that end by NUL,
since no name has that: the path, the entries, then each link and where it leads. They run where the next command would: in the first
session that is free. Relative paths begin at the work folder, `~` is `$HOME`.
"""

from __future__ import annotations

import asyncio
import json
import posixpath
import stat
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, cast

from fastapi import Request, Response
from pydantic import BaseModel, Field

from app.gateway import calls
from app.gateway.e2b import RpcError, Sandbox, SandboxOf
from app.gateway.e2b_connect import connect_errors, limit_of, parsed
from app.gateway.shape import shape_router
from tangram.action import Action
from tangram.calls import execute
from tangram.results import Chunk, ExecResult

LIMIT_S = 60.0
"""Longest time of one call, seconds, unless its client names a shorter one."""

LISTING_BYTES = 8 * 1024 * 1024
"""Most bytes of a listing that are read, which are some 100,000 entries."""

_INVALID, _MISSING, _EXISTS = 40, 44, 49
_CODES = {_INVALID: "invalid_argument", _MISSING: "not_found", _EXISTS: "already_exists"}
_REASONS = {
    "Permission denied": "permission_denied",
    "Operation not permitted": "permission_denied",
    "Read-only file system": "permission_denied",
    "No space left on device": "resource_exhausted",
}
"""What tools say of the files that they were given, besides what is wrong with the call in other ways."""

_NOT_RUN = 126
"""From this exit code on, a tool is missing or was ended, which says nothing of the call."""

_DEEPEST = 100_000
"""Deeper folders are as deep as their depth can be said to `find`; no path there could be named."""

_ENTRY = "//"
"""What each entry begins with; the relative paths that `find` shows never have it."""

_STAT_ENTRY = f"stat -c '{_ENTRY}%f %s %Y %U %G %A %n' --"

_PRELUDE = f"""
export LC_ALL=C
fail() {{ printf '%s\\n' "$2" >&2; exit "$1"; }}
whole() {{ case $1 in "~") p=$HOME ;; "~/"*) p=$HOME/${{1#"~/"}} ;; /*) p=$1 ;; *) p=$(pwd)/$1 ;; esac; }}
there() {{ [ -e "$1" ] || [ -L "$1" ] || fail {_MISSING} "path $1 does not exist"; }}
links='for f; do printf "%s\\0" "$f"; readlink -n -- "$f"; printf "\\0"; done'
show() {{
  printf '%s\\0' "$1"; stat -c '{_ENTRY}%f %s %Y %U %G %A .' -- "$1" || exit; printf '\\0'
  [ ! -L "$1" ] || {{ printf '.\\0'; readlink -n -- "$1"; printf '\\0'; }}
}}
"""

_STAT = _PRELUDE + 'whole "$1"; there "$p"; show "$p"'

_LIST = f"""{_PRELUDE}
whole "$1"; there "$p"
[ -d "$p" ] || fail {_INVALID} "path $p is no directory"
printf '%s\\0' "$p"
cd -- "$p" || exit
find . -mindepth 1 -maxdepth "$2" -exec {_STAT_ENTRY} {{}} + || exit
printf '\\0'
find . -mindepth 1 -maxdepth "$2" -type l -exec sh -c "$links" sh {{}} +
"""

_MAKE = f"""{_PRELUDE}
whole "$1"
[ ! -d "$p" ] || fail {_EXISTS} "directory $p exists already"
[ ! -e "$p" ] || fail {_INVALID} "path $p exists and is no directory"
mkdir -p -- "$p" && show "$p"
"""

_MOVE = f"""{_PRELUDE}
whole "$1"; from=$p; there "$from"
whole "$2"
[ ! -d "$p" ] || fail {_INVALID} "path $p is a directory"
folder=${{p%/*}}; mkdir -p -- "${{folder:-/}}" && mv -f -- "$from" "$p" && show "$p"
"""

_REMOVE = _PRELUDE + 'whole "$1"; rm -rf -- "$p"'

router = shape_router("e2b", connect_errors, prefix="/filesystem.Filesystem", tags=["e2b"])


class PathMessage(BaseModel):
    """A message that names a path."""

    path: str = Field(min_length=1)


class ListMessage(PathMessage):
    """Which folder to list, and how deep; 0 is 1."""

    depth: int = Field(1, ge=0, lt=2**32)


class MoveMessage(BaseModel):
    """What to move where."""

    source: str = Field(min_length=1)
    destination: str = Field(min_length=1)


@dataclass(frozen=True, slots=True)
class _Outcome:
    text: str

    def entries(self) -> list[dict[str, Any]]:
        """Return what was shown of files, by path."""
        folder, shown, *links = self.text.split("\0")
        entries: dict[str, dict[str, Any]] = {}
        for fields in shown.split(_ENTRY)[1:]:
            entry = _entry(folder, *fields.removesuffix("\n").split(" ", 6))
            entries[entry["path"]] = entry
        for path, target in zip(links[::2], links[1::2], strict=False):
            if (link := entries.get(posixpath.normpath(posixpath.join(folder, path)))) is not None:
                link["symlinkTarget"] = target
        return [entries[path] for path in sorted(entries)]


@router.post("/Stat")
async def stat_path(request: Request, sandbox: SandboxOf) -> dict[str, Any]:
    """Say what is at a path."""
    message = parsed(PathMessage, await request.body())
    return {"entry": (await _run(request, sandbox, _STAT, message.path)).entries()[0]}


@router.post("/ListDir")
async def list_folder(request: Request, sandbox: SandboxOf) -> Response:
    """Say what is in a folder, by path."""
    message = parsed(ListMessage, await request.body())
    listed = await _run(request, sandbox, _LIST, message.path, str(min(message.depth or 1, _DEEPEST)))
    # Of a large folder this takes seconds, which other calls would wait for.
    return Response(await asyncio.to_thread(lambda: json.dumps({"entries": listed.entries()})), media_type="application/json")


@router.post("/MakeDir")
async def make_folder(request: Request, sandbox: SandboxOf) -> dict[str, Any]:
    """Make a folder, and those above it."""
    message = parsed(PathMessage, await request.body())
    return {"entry": (await _run(request, sandbox, _MAKE, message.path)).entries()[0]}


@router.post("/Move")
async def move(request: Request, sandbox: SandboxOf) -> dict[str, Any]:
    """Give a file or a folder another path."""
    message = parsed(MoveMessage, await request.body())
    return {"entry": (await _run(request, sandbox, _MOVE, message.source, message.destination)).entries()[0]}


@router.post("/Remove")
async def remove(request: Request, sandbox: SandboxOf) -> dict[str, Any]:
    """Remove a file or a folder with all that is in it; one that is not there is removed."""
    message = parsed(PathMessage, await request.body())
    await _run(request, sandbox, _REMOVE, message.path)
    return {}


@router.post("/{method}", include_in_schema=False)
async def not_served(method: str) -> None:
    """Refuse watching."""
    raise RpcError("unimplemented", f"filesystem.Filesystem/{method} is not served here: list the folder instead of watching it")


async def _run(request: Request, sandbox: Sandbox, script: str, *words: str) -> _Outcome:
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
        raise RpcError(_code(result.exit_code, problem), problem)
    return _Outcome(text)


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
    if exit_code >= _NOT_RUN:
        return "internal"
    return next((code for reason, code in _REASONS.items() if reason in problem), "invalid_argument")


def _entry(folder: str, mode: str, size: str, changed_at: str, owner: str, group: str, permissions: str, path: str) -> dict[str, Any]:
    bits, path = int(mode, 16), posixpath.normpath(posixpath.join(folder, path))
    kind = "DIRECTORY" if stat.S_ISDIR(bits) else "SYMLINK" if stat.S_ISLNK(bits) else "FILE"
    return {
        "name": posixpath.basename(path),
        "type": f"FILE_TYPE_{kind}",
        "path": path,
        "size": size,
        "mode": stat.S_IMODE(bits),
        "permissions": permissions,
        "owner": owner,
        "group": group,
        "modifiedTime": datetime.fromtimestamp(int(changed_at), UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    } | ({"isSymlink": True} if kind == "SYMLINK" else {})
