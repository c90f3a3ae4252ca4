"""What the classes ask of an environment, as actions: to be opened, and folders in and out.

Nothing here waits or connects. A transfer is a generator of actions that is sent their results; `drive` and `drive_async` carry it out.
"""

from __future__ import annotations

import logging
import posixpath
import secrets
import shlex
import tarfile
import tempfile
from collections.abc import Awaitable, Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, TypeVar

from tangram.action import Action
from tangram.calls import Place, execute, open_environment, read_file, write_file
from tangram.errors import ActionFailed, ActionLost, ActionRejected, TangramError
from tangram.results import ExecResult

CONTAINERS = "isolation:container"
"""The label of nodes whose environments are containers."""

PART_BYTES = 8 * 1024 * 1024
"""A file travels in parts of this size, so that no message is larger."""

_IN_MEMORY_BYTES = 4 * PART_BYTES
_TRANSFER_S = 600.0
_MISSING = 44
_CLOSED = ("environment_closed", "lease_over", "cancelled", "client_gone")
"""The causes by which actions fail on an environment that was closed."""

_log = logging.getLogger(__name__)

T = TypeVar("T")
Transfer = Generator[Action, Any, T]


class TransferFailed(TangramError):
    """Raised when files could not be brought into an environment, or out of it."""


def open_detached(job: str, name: str = "", *, image: str | None = None, label: str = "", memory_mb: int | None = None) -> Action:
    """Open an environment that stands until it is closed, or unused for `TANGRAM_LEASE_S`.

    Its id starts with `name`, and is the name of its trajectory, too.
    """
    action = open_environment(
        job, trajectory="-", image=image, memory_mb=memory_mb, requires=() if image is None else (CONTAINERS,), detached=True
    )
    environment = f"{name or 'env'}-{secrets.token_hex(8)}"
    arguments: dict[str, Any] = {**action.arguments, "environment": environment}
    return replace(action, environment=environment, trajectory=environment, arguments=arguments, action_class=label[:256] or None)


def lacks_containers(error: ActionRejected) -> bool:
    """Return whether an environment was refused since no node has containers: then an image can only be a label."""
    return CONTAINERS in error.reason


def upload(place: Place, source: Path, target: str) -> Transfer[None]:
    """Bring a file, or the contents of a folder, to the path `target`; relative paths start at the working folder.

    Folders that are missing are made; files that are there already are replaced, others stay.
    """
    with tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY_BYTES) as packed:
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for path in sorted(source.iterdir()) if source.is_dir() else [source]:
                archive.add(path, path.name if source.is_dir() else "file", filter=_owned_by_nobody)
        packed.seek(0)
        yield from _unpack_there(place, packed, source, target)


def download(place: Place, source: str, target: Path) -> Transfer[None]:
    """Fetch a file, or the contents of a folder, of an environment to the path `target`.

    Links in a folder that lead out of it are left out, and the log says so. Raises `FileNotFoundError` when there is no such file or
    folder; `TransferFailed` when it cannot be packed there, or unpacked here.
    """
    name, quoted = f".tangram-transfer-{secrets.token_hex(8)}", shlex.quote(source if source.startswith("/") else "./" + source)
    pack = (
        f"if [ -d {quoted} ]; then tar -cf {name} -C {quoted} . && echo folder; else [ -e {quoted} ] || exit {_MISSING}; "
        f'tar -chf {name} -C "$(dirname {quoted})" "$(basename {quoted})" && echo file; fi && wc -c < {name}'
    )
    done = yield _command(place, pack)
    if done.exit_code == _MISSING:
        raise FileNotFoundError(f"{source} does not exist in environment {place.environment}")
    kind, size = _checked(done, f"{source} could not be packed").stdout.split()
    with tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY_BYTES) as packed:
        for number in range(-(-int(size) // PART_BYTES)):
            part = f"dd if={name} of={name}.part bs={PART_BYTES} skip={number} count=1"
            _checked((yield _command(place, part)), f"{source} could not be read")
            packed.write((yield read_file(place, f"{name}.part")))
        _checked((yield _command(place, f"rm -f {name} {name}.part")), f"{name} could not be removed")
        packed.seek(0)
        try:
            _unpack_here(packed, target, is_folder=kind == "folder")
        except tarfile.TarError as error:
            raise TransferFailed(f"{source} could not be unpacked to {target}: {error}") from error


def drive(transfer: Transfer[T], run: Callable[[Action], Any]) -> T:
    """Carry out a transfer with `run`, which returns an action's result or raises its error."""
    try:
        action = next(transfer)
        while True:
            try:
                result = run(action)
            except TangramError as error:
                action = transfer.throw(error)
            else:
                action = transfer.send(result)
    except StopIteration as stop:
        value: T = stop.value
        return value


async def drive_async(transfer: Transfer[T], run: Callable[[Action], Awaitable[Any]], step: Callable[..., Awaitable[Any]]) -> T:
    """Carry out a transfer like `drive`; `step` calls a function off the event loop, such as `asyncio.to_thread`."""
    action, stop = await step(_next, transfer.__next__)
    while action is not None:
        try:
            result = await run(action)
        except TangramError as error:
            action, stop = await step(_next, transfer.throw, error)
        else:
            action, stop = await step(_next, transfer.send, result)
    value: T = stop
    return value


def _next(advance: Callable[..., Action], *arguments: Any) -> tuple[Action | None, Any]:
    """Return the next action, or None and the value of the transfer: StopIteration cannot pass through a coroutine."""
    try:
        return advance(*arguments), None
    except StopIteration as stop:
        return None, stop.value


def _unpack_there(place: Place, packed: IO[bytes], source: Path, target: str) -> Transfer[None]:
    name, quoted = f".tangram-transfer-{secrets.token_hex(8)}", shlex.quote(target if target.startswith("/") else "./" + target)
    while part := packed.read(PART_BYTES):
        yield write_file(place, f"{name}.part", part)
        _checked((yield _command(place, f"cat {name}.part >> {name} && rm {name}.part")), f"{source} could not be written")
    if source.is_dir():
        unpack = f"mkdir -p {quoted} && tar -xf {name} -C {quoted}"
    else:
        unpack = f'mkdir -p "$(dirname {quoted})" && tar -xf {name} -O file > {quoted} && chmod {source.stat().st_mode & 0o777:o} {quoted}'
    _checked((yield _command(place, f"{unpack}; code=$?; rm -f {name}; exit $code")), f"{source} could not be unpacked to {target}")


def _unpack_here(packed: IO[bytes], target: Path, *, is_folder: bool) -> None:
    with tarfile.open(fileobj=packed) as archive:
        if is_folder:
            target.mkdir(parents=True, exist_ok=True)
            # A pipe or a device has no contents, and must not spoil the rest.
            archive.extractall(target, members=[member for member in archive if not member.isdev()], filter=_leave_out_strays())
            return
        contents = archive.extractfile(archive.getmembers()[0])
        if contents is None:
            raise TransferFailed(f"what was to become {target} is no regular file")
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as stream:
            while part := contents.read(PART_BYTES):
                stream.write(part)


def _leave_out_strays() -> Callable[[tarfile.TarInfo, str], tarfile.TarInfo | None]:
    """Return a filter for one archive that leaves out what leads out of the folder, and hard links to that."""
    left_out: set[str] = set()

    def kept(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo | None:
        try:
            if not member.islnk() or posixpath.normpath(member.linkname) not in left_out:
                return tarfile.data_filter(member, folder)
        except tarfile.FilterError:
            pass
        left_out.add(posixpath.normpath(member.name))
        _log.warning("%r is left out: %r is outside of %s", member.name, member.linkname or member.name, folder)
        return None

    return kept


def _command(place: Place, line: str) -> Action:
    """Run a line of a transfer in a session of its own: a command that runs in another one does not hold it up."""
    return execute(place, f"( {line} )", session="transfer", timeout_s=_TRANSFER_S, action_class="transfer")


def _checked(done: ExecResult, problem: str) -> ExecResult:
    if done.exit_code != 0:
        raise TransferFailed(f"{problem}: {(done.stderr or done.reason).strip()[-500:]}")
    return done


def _owned_by_nobody(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def is_gone(error: TangramError) -> bool:
    """Return whether an error says that an environment is not there any more: closed, being closed, or lost."""
    return isinstance(error, ActionLost) or (isinstance(error, ActionFailed) and error.cause in _CLOSED)
