"""E2B's `/files`: what files hold, in and out.

Bodies are one file as it is (`application/octet-stream`), or a form with one part for each file, whose file name is the path. A URL may
carry a signature instead of the sandbox's token; then its host name must name the sandbox.
"""

from __future__ import annotations

import base64
import hashlib
import posixpath
import secrets
import time
import zlib
from typing import Annotated, Any

from fastapi import Depends, Request, Response
from starlette.datastructures import UploadFile

from app.gateway import calls
from app.gateway.e2b import RpcError, Sandbox, data_errors, find_sandbox, sandbox_of
from app.gateway.errors import BadRequest, TooLarge, Unauthorized
from app.gateway.shape import shape_router
from tangram.calls import read_file, write_file

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
        if not expires.isdigit() or int(expires) < time.time():
            raise Unauthorized("the signature has expired")
    signature = base64.b64encode(hashlib.sha256(":".join(words).encode()).digest()).rstrip(b"=").decode("ascii")
    if not secrets.compare_digest(f"v1_{signature}".encode(), query["signature"].encode()):
        raise Unauthorized("the signature does not fit")
    request.state.job = sandbox.record.job
    return sandbox


FileSandboxOf = Annotated[Sandbox, Depends(sandbox_of_file)]


@router.get("/files", response_class=Response)
async def download(request: Request, sandbox: FileSandboxOf, path: str) -> Response:
    """Return the bytes of a file."""
    try:
        data: bytes = await calls.run(sandbox.caller, read_file(sandbox.record.place, path), request=request)
    except BadRequest as error:
        raise RpcError("not_found", str(error)) if error.problem == "NoSuchFile" else error from None
    return Response(data, media_type="application/octet-stream")


@router.post("/files")
async def upload(request: Request, sandbox: FileSandboxOf, path: str | None = None) -> list[dict[str, Any]]:
    """Write files, with the folders above them."""
    kind = request.headers.get("content-type", "")
    if kind.startswith("application/octet-stream"):
        if not path:
            raise BadRequest("path: the query is to name the file")
        return [await _write(sandbox, path, await _whole_body(request))]
    if not kind.startswith("multipart/form-data"):
        raise BadRequest(f"content-type: must be multipart/form-data or application/octet-stream, not {kind[:80]!r}")
    written = []
    async with request.form() as form:
        files = [value for value in form.getlist("file") if isinstance(value, UploadFile)]
        if not files or (path and len(files) > 1):
            raise BadRequest("the form must have parts called `file`, and one alone where the query names a path")
        for file in files:
            name = path or file.filename
            if not name:
                raise BadRequest("the file name of each part is to be its path")
            written.append(await _write(sandbox, name, await file.read()))
    return written


async def _whole_body(request: Request) -> bytes:
    """Return the body, unpacked where it is compressed. Raises `BadRequest` and `TooLarge`."""
    data = await request.body()
    encoding = request.headers.get("content-encoding", "identity")
    if encoding == "identity":
        return data
    if encoding != "gzip":
        raise BadRequest(f"content-encoding: must be gzip, not {encoding[:40]!r}")
    most = request.app.state.gateway.settings.gateway_body_mb * 2**20
    unpacker = zlib.decompressobj(_GZIP)
    try:
        unpacked = unpacker.decompress(data, most)
    except zlib.error as error:
        raise BadRequest(f"the body is no gzip data: {error}") from None
    if unpacker.unconsumed_tail:
        raise TooLarge(f"the unpacked body is larger than {most} bytes (TANGRAM_GATEWAY_BODY_MB)")
    if not unpacker.eof:
        raise BadRequest("the gzip data of the body is cut")
    return unpacked


async def _write(sandbox: Sandbox, path: str, data: bytes) -> dict[str, Any]:
    # A write that has begun is carried through, whether or not its caller waits.
    await calls.run(sandbox.caller, write_file(sandbox.record.place, path, data))
    return {"name": posixpath.basename(path), "type": "file", "path": path}
