"""Uploads of SWE-ReX's clients: one file, or a folder as a ZIP archive, taken to an environment in parts.

No part is larger than `PART_BYTES`, so the event loop is never held up for long. An archive becomes a tar archive first, as every image has
`tar`, and few have `unzip`. Files keep the permissions that the archive has for them.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
import struct
import tarfile
import tempfile
import zipfile
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import IO

from starlette.datastructures import UploadFile

from app.gateway import rex_scripts as scripts
from app.gateway.errors import BadRequest, GatewayError, InfraFailed, TooLarge, classify
from app.gateway.rex_errors import is_folder, os_error
from app.gateway.rex_runtime import Runtime
from tangram.errors import ActionFailed, TangramError
from tangram.file_scripts import stopped_by

PART_BYTES = 2**20

MOST_ENTRIES = 2**16
"""The most entries of an archive, at 128 bytes each on average. Python reads all of them before it says how many they are."""

MOST_GROWTH = 64
"""How many times larger than its archive a folder may be."""

_ELSEWHERE = "/tmp"
_IN_MEMORY_BYTES = 8 * PART_BYTES
_PERMISSIONS = 0o777

_END, _ENTRIES, _LONGEST_END = b"PK\5\6", struct.Struct("<10xHL4x2x"), 2**16 + 22


async def upload(runtime: Runtime, file: UploadFile, target: str, *, unzip: bool) -> None:
    """Write a file to `target`, or what is in an archive below it.

    Raises `GatewayError` as the actions end, `BadRequest` for what is no archive, `TooLarge` for one that grows too much.
    """
    if not unzip:
        await _replace(runtime, target, file)
        return
    with tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES) as archive:
        await asyncio.to_thread(_to_tar, file, archive)
        archive.seek(0)
        read = partial(asyncio.to_thread, archive.read)
        await _through(runtime, target, target, read, lambda kept: scripts.unpack_text(target, kept))


async def _write(runtime: Runtime, path: str, read: Callable[[int], Awaitable[bytes]]) -> None:
    part, offset = await read(PART_BYTES), 0
    await runtime.write_file(path, part)
    while part:
        offset += len(part)
        if part := await read(PART_BYTES):
            await runtime.write_file(path, part, offset)


async def _replace(runtime: Runtime, path: str, file: UploadFile) -> None:
    """Write a file whole, or leave what is at its path as it is: one of several parts takes that path once all of them are there."""
    folder, name = posixpath.split(path)
    if (file.size or 0) <= PART_BYTES or not name or path == "~":
        await _write(runtime, path, file.read)
        return
    folder = folder or "."
    is_open = (await runtime.beside(scripts.may_write_text(folder), "upload")).exit_code == 0
    where = folder if is_open else _ELSEWHERE  # a file of a folder that may not be written may be written all the same
    await _through(runtime, path, where, file.read, lambda kept: scripts.replace_text(folder, kept if is_open else f"{where}/{kept}", name))


async def _through(
    runtime: Runtime, target: str, folder: str, read: Callable[[int], Awaitable[bytes]], script: Callable[[str], str]
) -> None:
    """Take what `read` gives to a file of a folder, and have a script use that by its name; where this fails, it is removed."""
    name = f".{runtime.mark}"
    try:
        await _write(runtime, posixpath.join(folder, name), read)
        result = await runtime.beside(script(name), "upload")
    except TangramError as error:
        if not isinstance(error, InfraFailed):
            with suppress(GatewayError):
                await runtime.beside(scripts.remove_text(folder, name), "upload")
        raise
    if result.exit_code == 0:
        return
    with suppress(GatewayError):
        await runtime.beside(scripts.remove_text(folder, name), "upload")
    problem = f"the upload to {target} could not be written: {result.stderr.strip() or result.reason}"
    if cause := stopped_by(result.exit_code, result.cause, problem):
        raise classify(ActionFailed(problem, cause))
    raise is_folder(target) if result.exit_code == scripts.IS_FOLDER else os_error(problem)


def _to_tar(file: UploadFile, archive: IO[bytes]) -> None:
    """Write what is in a ZIP archive to a tar archive; what would lead out of its folder is put inside, as Python does."""
    _check_entries(file.file)
    try:
        with zipfile.ZipFile(file.file) as source, tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT) as target:
            entries = source.infolist()
            if sum(entry.file_size for entry in entries) > MOST_GROWTH * max(PART_BYTES, file.size or 0):
                raise TooLarge(f"the folder is more than {MOST_GROWTH} times as large as its archive")
            for entry in entries:
                name = "/".join(step for step in entry.filename.split("/") if step not in ("", ".", ".."))
                if name:
                    _add(source, entry, target, name)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
        raise BadRequest(f"file: no ZIP archive that can be read: {error}") from error


def _check_entries(file: IO[bytes]) -> None:
    """Refuse an archive with too many entries. Its end says how many they are, and what they take (APPNOTE.TXT of PKZIP, 4.3.16)."""
    file.seek(0, os.SEEK_END)
    file.seek(max(0, file.tell() - _LONGEST_END))
    end = file.read()
    at = end.rfind(_END)
    if 0 <= at <= len(end) - _ENTRIES.size:
        count, size = _ENTRIES.unpack_from(end, at)
        if count >= MOST_ENTRIES - 1 or size > MOST_ENTRIES * 128:
            raise TooLarge(f"the archive has {MOST_ENTRIES - 1} files or more, or their names are too long")


def _add(source: zipfile.ZipFile, entry: zipfile.ZipInfo, target: tarfile.TarFile, name: str) -> None:
    member = tarfile.TarInfo(name)
    permissions = entry.external_attr >> 16 & _PERMISSIONS
    if entry.is_dir():
        member.type, member.mode = tarfile.DIRTYPE, permissions or 0o755
        target.addfile(member)
        return
    member.size, member.mode = entry.file_size, permissions or 0o644
    with source.open(entry) as content:
        target.addfile(member, content)
