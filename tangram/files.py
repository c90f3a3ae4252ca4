"""Files of an environment: `env.files`, for both clients.

| call                                        | becomes                                                                    |
|---------------------------------------------|----------------------------------------------------------------------------|
| `read`, `write` of one file                 | `cpu.read_file`, `cpu.write_file`, in parts of `PART_BYTES`; no core       |
| `read`, `write` of several, `upload` and    | one command with a tar archive as base64 in its output or its text. What   |
| `download` of folders                       | is too large for that goes through a file of the environment, in parts     |
| all others                                  | one command                                                                |

Each operation is a generator that yields actions and is sent their results. So the sync and the async client differ only in how they wait.
Commands run in a shell session of their own, `SESSION`, which begins in the environment's home as `read_file` does.
"""

from __future__ import annotations

import asyncio
import base64
import io
import os
import secrets
import shlex
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar, overload

from tangram import calls, file_scripts
from tangram.action import Action
from tangram.arguments import AnyPath, content, iterable, path_text, whole_number
from tangram.calls import Place
from tangram.errors import ActionError, ActionFailed, ActionRefused, InvalidAction
from tangram.file_scripts import FileInfo
from tangram.results import ExecResult
from tangram.session import Session
from tangram.tar import tarfile

T = TypeVar("T")
P = TypeVar("P", bound=AnyPath)
Steps = Generator[Action, Any, T]
Content = bytes | str

PART_BYTES = 4 << 20
MOST_READ_BYTES = 1 << 30
"""The most that a call returns of files. Programs can make a file that has any size and takes no disk."""
SESSION = "tangram-files"

_PROBLEMS = {file_scripts.MISSING: "NoSuchFile", file_scripts.INVALID: "FileUnusable"}


class Files:
    """Files of an environment. Relative paths begin in its home, which is also `~`.

    Raises `ActionRefused` with the problem `NoSuchFile` or `FileUnusable` for what is not there, or is not what the call needs.
    """

    def __init__(self, session: Session, place: Place) -> None:
        """Stand for the files of an environment; `Environment.files` makes these."""
        self._session, self._place = session, place

    @overload
    def read(self, path: AnyPath) -> bytes: ...  # type: ignore[overload-overlap]
    @overload
    def read(self, path: Iterable[P]) -> dict[P, bytes]: ...
    def read(self, path: AnyPath | Iterable[P]) -> bytes | dict[P, bytes]:
        """Return the bytes of a file, or of several files by path: 1 GiB at most. `download` takes larger ones."""
        found: bytes | dict[P, bytes] = self._run(_read(self._place, path))
        return found

    def write(self, path: AnyPath | Mapping[P, Content], data: Content = b"", mode: int | None = None) -> None:
        """Write a file, or several that are given by path; folders above are made, text is UTF-8.

        `mode` are the permission bits of a single file.
        """
        self._run(_write(self._place, path, data, mode))

    def list(self, path: AnyPath = "~", depth: int = 1) -> list[FileInfo]:
        """Return what is in a folder, by path; with a larger `depth` also what is in folders below it."""
        return self._run(_list(self._place, path, depth))

    def exists(self, path: AnyPath) -> bool:
        """Return whether anything is at a path, be it a link that leads nowhere."""
        return self._run(_exists(self._place, path))

    def stat(self, path: AnyPath) -> FileInfo:
        """Return what is at a path; a link is not followed."""
        return self._run(_stat(self._place, path))

    def make_dir(self, *paths: AnyPath) -> None:
        """Make folders, and those above them. A folder may be there already."""
        self._run(_on_each(self._place, file_scripts.MAKE_ALL, paths))

    def remove(self, *paths: AnyPath) -> None:
        """Remove files, and folders with all that is in them. What is not there counts as removed."""
        self._run(_on_each(self._place, file_scripts.REMOVE, paths))

    def rename(self, path: AnyPath, to: AnyPath) -> FileInfo:
        """Give a file or a folder another path, and return what is there then. A file that has this path is replaced."""
        return self._run(_rename(self._place, path, to))

    def upload(self, local: AnyPath, path: AnyPath) -> None:
        """Write a local file to a path, or what is in a local folder into a folder there. Raises `OSError` for what cannot be read."""
        self._run(upload(self._place, path, _Local.pack(local)))

    def download(self, path: AnyPath, local: AnyPath) -> None:
        """Write a file to a local path, or what is in a folder into a local folder. Raises `OSError` for what cannot be written.

        Raises `ActionRefused` for a folder with names or links that lead out of the local folder.
        """
        _Local.unpack(self._run(pack(self._place, path)), local)

    def _run(self, steps: Steps[T]) -> T:
        return drive(steps, lambda action: self._session.submit(action).result())


class AsyncFiles:
    """Files of an environment, for coroutines; see `Files`."""

    def __init__(self, session: Session, place: Place) -> None:
        """Stand for the files of an environment; `AsyncEnvironment.files` makes these."""
        self._session, self._place = session, place

    @overload
    async def read(self, path: AnyPath) -> bytes: ...  # type: ignore[overload-overlap]
    @overload
    async def read(self, path: Iterable[P]) -> dict[P, bytes]: ...
    async def read(self, path: AnyPath | Iterable[P]) -> bytes | dict[P, bytes]:
        """Return the bytes of a file, or of several files by path."""
        found: bytes | dict[P, bytes] = await self._run(_read(self._place, path))
        return found

    async def write(self, path: AnyPath | Mapping[P, Content], data: Content = b"", mode: int | None = None) -> None:
        """Write a file, or several that are given by path; see `Files.write`."""
        await self._run(_write(self._place, path, data, mode))

    async def list(self, path: AnyPath = "~", depth: int = 1) -> list[FileInfo]:
        """Return what is in a folder, by path; see `Files.list`."""
        return await self._run(_list(self._place, path, depth))

    async def exists(self, path: AnyPath) -> bool:
        """Return whether anything is at a path; see `Files.exists`."""
        return await self._run(_exists(self._place, path))

    async def stat(self, path: AnyPath) -> FileInfo:
        """Return what is at a path; a link is not followed."""
        return await self._run(_stat(self._place, path))

    async def make_dir(self, *paths: AnyPath) -> None:
        """Make folders, and those above them. A folder may be there already."""
        await self._run(_on_each(self._place, file_scripts.MAKE_ALL, paths))

    async def remove(self, *paths: AnyPath) -> None:
        """Remove files, and folders with all that is in them; see `Files.remove`."""
        await self._run(_on_each(self._place, file_scripts.REMOVE, paths))

    async def rename(self, path: AnyPath, to: AnyPath) -> FileInfo:
        """Give a file or a folder another path; see `Files.rename`."""
        return await self._run(_rename(self._place, path, to))

    async def upload(self, local: AnyPath, path: AnyPath) -> None:
        """Write a local file, or what is in a local folder, to a path; see `Files.upload`."""
        await self._run(upload(self._place, path, await asyncio.to_thread(_Local.pack, local)))

    async def download(self, path: AnyPath, local: AnyPath) -> None:
        """Write a file, or what is in a folder, to a local path; see `Files.download`."""
        await asyncio.to_thread(_Local.unpack, await self._run(pack(self._place, path)), local)

    async def _run(self, steps: Steps[T]) -> T:
        return await drive_async(steps, self._session.submit)


def drive(steps: Steps[T], run: Callable[[Action], Any]) -> T:
    """Go through steps with `run`, which returns an action's result or raises its error."""
    action, value = _next(steps)
    while action is not None:
        try:
            answer, error = run(action), None
        except ActionError as raised:
            answer, error = None, raised
        action, value = _next(steps, answer, error)
    done: T = value
    return done


async def drive_async(steps: Steps[T], run: Callable[[Action], Awaitable[Any]]) -> T:
    """Go through steps like `drive`."""
    action, value = _next(steps)
    while action is not None:
        try:
            answer, error = await run(action), None
        except ActionError as raised:
            answer, error = None, raised
        action, value = _next(steps, answer, error)
    done: T = value
    return done


def _next(steps: Steps[Any], answer: Any = None, error: ActionError | None = None) -> tuple[Action | None, Any]:
    """Tell the steps how their last action ended, and return their next one, or None and their value."""
    try:
        return (steps.send(answer) if error is None else steps.throw(error)), None
    except StopIteration as end:
        return None, end.value


class _Local:
    """Archives of local files; a folder's begins with the folder itself, `.`."""

    @staticmethod
    def pack(local: AnyPath) -> tuple[bytes, int | None]:
        """Return what is in a file and its permissions, or an archive of a folder and None."""
        source, file = Path(local), io.BytesIO()
        if not source.is_dir():
            return source.read_bytes(), source.stat().st_mode & 0o777
        with tarfile.open(fileobj=file, mode="w") as archive:
            archive.add(source, ".")
        return file.getvalue(), None

    @staticmethod
    def unpack(packed: IO[bytes], local: AnyPath) -> None:
        target = Path(local)
        with opened(packed) as archive:
            first = archive.getmembers()[0]
            if not first.isdir():
                write_out(archive, first, target)
                target.chmod(first.mode & 0o777)
                return
            target.mkdir(parents=True, exist_ok=True)
            archive.extractall(target, filter="data")


@contextmanager
def opened(packed: IO[bytes]) -> Iterator[tarfile.TarFile]:
    """Open an archive from an environment, whose programs may have written anything, and close it at the end.

    Raises `ActionRefused` for what cannot be used.
    """
    packed.seek(0)
    try:
        # Of no compressed archive is known how much it holds.
        with packed, tarfile.open(fileobj=packed, mode="r:") as archive:
            yield archive
    except (tarfile.TarError, LookupError, ValueError, OverflowError, RecursionError) as error:
        raise ActionRefused(f"what the environment has packed cannot be used here: {error}", "FileUnusable") from None


def _plain(archive: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    """Return a file of an archive. Raises `tarfile.ReadError` for what is none, or says that it is larger than the archive."""
    file = archive.extractfile(member)
    if file is None or any(each.issparse() for each in archive.getmembers()):
        raise tarfile.ReadError(f"{member.name} is no plain file")
    return file


def write_out(archive: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    """Write a file of an archive to a local path, and make the folders above it. Raises `tarfile.ReadError`."""
    source = _plain(archive, member)
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as file:
        shutil.copyfileobj(source, file)


def _read(place: Place, path: AnyPath | Iterable[AnyPath]) -> Steps[Any]:
    if isinstance(path, (str, os.PathLike)):
        return (yield from _read_one(place, _path(path)))
    paths = {_path(one): one for one in iterable("path", path)}
    if not paths:
        return {}
    with opened((yield from _packed(place, file_scripts.PACK_FILES, *paths, reads="the archive of these files"))) as archive:
        return {name: _plain(archive, member).read() for name, member in zip(paths.values(), archive, strict=True)}


def _read_one(place: Place, path: str) -> Steps[bytes]:
    file = io.BytesIO()
    yield from _fetch(place, path, file, path)
    return file.getvalue()  # which is no copy


def _fetch(place: Place, path: str, file: IO[bytes], reads: str = "") -> Steps[None]:
    """Write what is in a file of the environment to a local one.

    Raises `ActionRefused` for more than fits into memory, where `reads` names what is read into it.
    """
    while True:
        part: bytes = yield calls.read_file(place, path, offset=file.tell(), length=PART_BYTES)
        file.write(part)
        if reads and file.tell() > MOST_READ_BYTES:
            raise ActionRefused(f"{reads} has more than the {MOST_READ_BYTES} bytes that are read into memory: download it", "FileTooLarge")
        if len(part) < PART_BYTES:
            return


def _write(place: Place, path: AnyPath | Mapping[P, Content], data: Content, mode: int | None) -> Steps[None]:
    if not isinstance(path, Mapping):
        yield from write_one(place, path, data, mode)
        return
    if mode is not None:
        raise InvalidAction("mode", "is of one file: give one path")
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for number, given in enumerate(path.values()):
            whole = content("data", given)
            member = tarfile.TarInfo(str(number))
            member.size = len(whole)
            archive.addfile(member, io.BytesIO(whole))
    if path:
        yield from unpack(place, file_scripts.UNPACK_FILES, file.getvalue(), *map(_path, path))


def write_one(place: Place, path: AnyPath, data: Content, mode: int | None) -> Steps[None]:
    """Write a file, in parts where it is large."""
    whole = content("data", data)
    yield calls.write_file(place, path, whole[:PART_BYTES], mode)
    for offset in range(PART_BYTES, len(whole), PART_BYTES):
        yield calls.write_file(place, path, whole[offset : offset + PART_BYTES], mode, offset=offset)


def _list(place: Place, path: AnyPath, depth: int) -> Steps[list[FileInfo]]:
    deep = max(1, whole_number("depth", depth, file_scripts.DEEPEST))
    result = yield from _command(place, file_scripts.LIST, _path(path), str(deep))
    if result.truncated:
        raise ActionFailed(f"{path} has more entries than TANGRAM_OUTPUT_LIMIT_BYTES lets through", "bad_input")
    return file_scripts.shown(result.stdout)


def _exists(place: Place, path: AnyPath) -> Steps[bool]:
    return (yield from _command(place, file_scripts.EXISTING, _path(path))).stdout == "1"


def _stat(place: Place, path: AnyPath) -> Steps[FileInfo]:
    return file_scripts.shown((yield from _command(place, file_scripts.STAT, _path(path))).stdout)[0]


def _rename(place: Place, path: AnyPath, to: AnyPath) -> Steps[FileInfo]:
    return file_scripts.shown((yield from _command(place, file_scripts.MOVE, _path(path), _path(to))).stdout)[0]


def _on_each(place: Place, script: str, paths: tuple[AnyPath, ...]) -> Steps[None]:
    if paths:
        yield from _command(place, script, *map(_path, paths))


def upload(place: Place, path: AnyPath, local: tuple[bytes, int | None]) -> Steps[None]:
    """Write a file of some content and permissions, or what an archive holds, given with None, into a folder."""
    data, mode = local
    if mode is None:
        yield from unpack(place, file_scripts.UNPACK, data, _path(path))
    else:
        yield from write_one(place, path, data, mode)


def pack(place: Place, path: AnyPath) -> Steps[IO[bytes]]:
    """Return an archive of a file, or of what is in a folder; the one of a folder begins with the folder itself, `.`."""
    return (yield from _packed(place, file_scripts.PACK, _path(path)))


def _packed(place: Place, script: str, *paths: str, reads: str = "") -> Steps[IO[bytes]]:
    """Return an archive that a script makes: from its output, or through files, there and here, where that is too long."""
    inline = f'{file_scripts.TO_TEXT}set -- "$t" "$@"\n( {script}\n) && base64 <"$t"'
    result = yield from _command(place, inline, *paths)
    if not result.truncated:
        try:
            return io.BytesIO(base64.b64decode(result.stdout))
        except ValueError as error:
            raise ActionRefused(f"what the environment has packed cannot be used here: {error}", "FileUnusable") from None

    def through(kept: str) -> Steps[IO[bytes]]:
        yield from _command(place, script, kept, *paths)
        file = tempfile.TemporaryFile()  # noqa: SIM115  (`opened` closes it)
        yield from _fetch(place, kept, file, reads)
        return file

    return (yield from _with_file(place, through))


def unpack(place: Place, script: str, packed: bytes, *paths: str) -> Steps[None]:
    """Have a script unpack an archive: from its own text, or from a file where that would be too long."""
    if len(packed) <= PART_BYTES:
        inline = f'{file_scripts.FROM_TEXT}set -- "$t" "$@"\n( {script}\n)'
        yield from _command(place, inline, *paths, data=packed)
        return

    def through(kept: str) -> Steps[None]:
        yield from write_one(place, kept, packed, None)
        yield from _command(place, script, kept, *paths)

    yield from _with_file(place, through)


def _with_file(place: Place, steps: Callable[[str], Steps[T]]) -> Steps[T]:
    """Go through steps with the path of a file of the environment. It is removed afterwards, also where an action or a local file fails."""
    kept = f"/tmp/{SESSION}-{secrets.token_hex(8)}"
    try:
        value = yield from steps(kept)
    except (ActionError, OSError):
        yield from _command(place, file_scripts.REMOVE, kept)
        raise
    yield from _command(place, file_scripts.REMOVE, kept)
    return value


def _command(place: Place, script: str, *words: str, data: bytes = b"") -> Steps[ExecResult]:
    """Run a script with arguments, and `data` as base64 in its standard input. Raises `ActionRefused` for what it says is wrong."""
    text = base64.encodebytes(data).decode("ascii")
    command = f"(\ncd || exit {file_scripts.INVALID}\nset -- {shlex.join(words)}\n{script}\n) <<'END'\n{text}END\n"
    result: ExecResult = yield calls.execute(place, command, session=SESSION, action_class=SESSION)
    if result.exit_code == 0:
        return result
    said = [line for line in result.stderr.strip().splitlines() if not line.startswith("tar: Exiting ")]
    problem = (said or [f"exit status {result.exit_code}"])[-1]
    if cause := file_scripts.stopped_by(result.exit_code, result.cause, problem):
        raise ActionFailed(problem, cause)
    raise ActionRefused(problem, _PROBLEMS.get(result.exit_code or 0, "FileUnusable"))


def _path(path: AnyPath) -> str:
    return path_text("path", path)
