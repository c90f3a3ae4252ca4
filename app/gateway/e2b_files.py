"""E2B's `/files`: what files hold, in and out.

Bodies are one file as it is (`application/octet-stream`), or a form with one part for each file, whose file name is the path. A URL may
carry a signature instead of the sandbox's token; then its host name must name the sandbox.

Files go through in parts, each an action, so the gateway holds one part at a time. An upload whose connection breaks leaves the parts that
have come.
"""

from __future__ import annotations

import base64
import hashlib
import posixpath
import secrets
import time
import zlib
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import Depends, Request, Response
from fastapi.responses import StreamingResponse
from starlette.datastructures import UploadFile

from app.gateway import calls
from app.gateway.e2b import RpcError, Sandbox, admit, data_errors, find_sandbox, sandbox_of
from app.gateway.e2b_connect import whole_number
from app.gateway.errors import BadRequest, TooLarge, Unauthorized
from app.gateway.shape import shape_router
from tangram.calls import read_file, write_file

PART_BYTES = 4 * 2**20
"""Length of a part of a file."""

MOST_FILES = 10_000
"""The most files of one form. Those of up to 1 MiB are held in memory, where TANGRAM_GATEWAY_BODY_MB limits all of them together."""

_MOST_UNPACKED = 2**20
_GZIP = 16 + zlib.MAX_WBITS

router = shape_router("e2b", data_errors, tags=["e2b"])


async def sandbox_of_file(request: Request) -> Sandbox:
    """Return the sandbox of a request, by its token or by the signature in the URL. Raises `SandboxGone` and `Unauthorized`."""
    query = request.query_params
    if "signature" not in query:
        return await sandbox_of(request)
    sandbox = await find_sandbox(request)
    words = [query.get("path", ""), "read" if request.method == "GET" else "write", query.get("username", ""), sandbox.record.access_token]
    expires = query.get("signature_expiration")
    if expires is not None:
        words.append(expires)
        if (whole_number(expires) or 0) < time.time():
            raise Unauthorized("the signature has expired")
    signature = base64.b64encode(hashlib.sha256(":".join(words).encode()).digest()).rstrip(b"=").decode("ascii")
    if not secrets.compare_digest(f"v1_{signature}".encode(), query["signature"].encode()):
        raise Unauthorized("the signature does not fit")
    admit(request, sandbox)
    return sandbox


FileSandboxOf = Annotated[Sandbox, Depends(sandbox_of_file)]


@router.get("/files", response_class=Response)
async def download(request: Request, sandbox: FileSandboxOf, path: str) -> Response:
    """Return the bytes of a file."""

    async def part_from(offset: int) -> bytes:
        action = read_file(sandbox.record.place, path, offset=offset, length=PART_BYTES)
        part: bytes = await calls.run(sandbox.caller, action)
        return part

    try:
        first = await part_from(0)
    except BadRequest as error:
        raise RpcError("not_found", str(error)) if error.problem == "NoSuchFile" else error from None
    if len(first) < PART_BYTES:
        return Response(first, media_type="application/octet-stream")

    async def parts() -> AsyncIterator[bytes]:
        part, offset = first, 0
        while part:
            yield part
            offset += len(part)
            part = await part_from(offset) if len(part) == PART_BYTES else b""

    return StreamingResponse(parts(), media_type="application/octet-stream")


@router.post("/files")
async def upload(request: Request, sandbox: FileSandboxOf, path: str | None = None) -> list[dict[str, Any]]:
    """Write files, with the folders above them."""
    kind = request.headers.get("content-type", "")
    if kind.startswith("application/octet-stream"):
        if not path:
            raise BadRequest("path: the query is to name the file")
        return [await _write(sandbox, path, _unpacked(request))]
    if kind.startswith("multipart/form-data"):
        return await _write_all(sandbox, request, path)
    raise BadRequest(f"content-type: must be multipart/form-data or application/octet-stream, not {kind[:80]!r}")


async def _write_all(sandbox: Sandbox, request: Request, path: str | None) -> list[dict[str, Any]]:
    async with request.form(max_files=MOST_FILES) as form:
        files = [value for value in form.getlist("file") if isinstance(value, UploadFile)]
        if not files or (path and len(files) > 1) or not all(path or file.filename for file in files):
            raise BadRequest(
                "the form must have parts called `file`, each with its path as file name, or one alone where the query names a path"
            )
        return [await _write(sandbox, path or str(file.filename), _read(file)) for file in files]


async def _read(file: UploadFile) -> AsyncIterator[bytes]:
    while part := await file.read(PART_BYTES):
        yield part


async def _unpacked(request: Request) -> AsyncIterator[bytes]:
    """Yield the body as it comes, unpacked where it is compressed. Raises `BadRequest` and `TooLarge`."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding == "identity":
        async for data in request.stream():
            yield data
        return
    if encoding != "gzip":
        raise BadRequest(f"content-encoding: must be gzip, not {encoding[:40]!r}")
    most, unpacker = request.app.state.gateway.settings.gateway_body_mb * 2**20, zlib.decompressobj(_GZIP)
    try:
        async for data in request.stream():
            while data and not unpacker.eof:
                part = unpacker.decompress(data, _MOST_UNPACKED)
                data, most = unpacker.unconsumed_tail, most - len(part)
                if most < 0:
                    raise TooLarge("the unpacked body is larger than TANGRAM_GATEWAY_BODY_MB allows")
                yield part
    except zlib.error as error:
        raise BadRequest(f"the body is no gzip data: {error}") from None
    if not unpacker.eof:
        raise BadRequest("the gzip data of the body is cut")


async def _write(sandbox: Sandbox, path: str, stream: AsyncIterator[bytes]) -> dict[str, Any]:
    """Write what comes to a file, part by part."""
    held, offset = bytearray(), 0
    async for data in stream:
        held += data
        while len(held) >= PART_BYTES:
            await _write_part(sandbox, path, bytes(held[:PART_BYTES]), offset)
            del held[:PART_BYTES]
            offset += PART_BYTES
    if held or not offset:
        await _write_part(sandbox, path, bytes(held), offset)
    return {"name": posixpath.basename(path), "type": "file", "path": path}


async def _write_part(sandbox: Sandbox, path: str, part: bytes, offset: int) -> None:
    await calls.run(sandbox.caller, write_file(sandbox.record.place, path, part, offset=offset))
