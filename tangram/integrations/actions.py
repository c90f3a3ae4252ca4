"""What the classes ask of an environment, as actions: to be opened, and folders in and out.

Nothing here waits or connects. A transfer is a generator of actions that is sent their results (`tangram/files.py`).
"""

from __future__ import annotations

import io
import logging
import posixpath
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO

from tangram import files
from tangram.action import Action
from tangram.calls import Place, make_up_environment, open_environment
from tangram.ends import CLOSED_ANYWAY
from tangram.errors import ActionFailed, ActionLost, ActionRefused, ActionRejected, TangramError
from tangram.files import Steps, opened, pack, write_out
from tangram.tar import tarfile
from tangram.wire import CONTAINERS

_CLOSED = ("environment_closed", *CLOSED_ANYWAY)
"""The causes by which actions fail on an environment that was closed."""

_log = logging.getLogger(__name__)


class TransferFailed(TangramError):
    """Raised when files could not be brought into an environment, or out of it."""


def open_detached(job: str, name: str = "", *, image: str | None = None, label: str = "", memory_mb: int | None = None) -> Action:
    """Open an environment that stands until it is closed, or unused for `TANGRAM_LEASE_S`.

    Its id starts with `name`, and is the name of its trajectory, too.
    """
    environment, requires = make_up_environment(name or "env"), () if image is None else (CONTAINERS,)
    action = open_environment(job, environment, image=image, memory_mb=memory_mb, requires=requires, detached=True)
    return replace(action, action_class=label[:256] or None)


def lacks_containers(error: ActionRejected) -> bool:
    """Return whether an environment was refused since no node has containers: then an image can only be a label."""
    return CONTAINERS in error.reason


def read_local(source: Path) -> tuple[bytes, int | None]:
    """Return the content and the permissions of a file, or an archive of what is in a folder, and None. Raises `OSError`."""
    if not source.is_dir():
        return source.read_bytes(), source.stat().st_mode & 0o777
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for path in sorted(source.iterdir()):
            archive.add(path, path.name)
    return file.getvalue(), None


def upload(place: Place, local: tuple[bytes, int | None], target: str) -> Steps[None]:
    """Bring what `read_local` has returned to the path `target`; relative paths start at the working folder.

    Folders that are missing are made; files that are there already are replaced, others stay. Raises `TransferFailed`.
    """
    with _refused(f"what goes to {target} could not be written"):
        yield from files.upload(place, _literal(target), local)


def download(place: Place, source: str) -> Steps[IO[bytes]]:
    """Return an archive of a file, or of the contents of a folder, for `write_local`.

    Raises `FileNotFoundError` when there is no such file or folder; `TransferFailed` when it cannot be packed there.
    """
    with _refused(f"{source} could not be packed", f"{source} does not exist in environment {place.environment}"):
        return (yield from pack(place, _literal(source)))


def write_local(packed: IO[bytes], target: Path) -> None:
    """Write what `download` has returned to the path `target`. Raises `TransferFailed`.

    Links in a folder that lead out of it are left out, and the log says so.
    """
    with _refused(f"what was to become {target} could not be unpacked"), opened(packed) as archive:
        first = archive.getmembers()[0]
        if not first.isdir():
            write_out(archive, first, target)
            return
        target.mkdir(parents=True, exist_ok=True)
        # A pipe or a device has no contents, and must not spoil the rest.
        archive.extractall(target, members=[member for member in archive if not member.isdev()], filter=_leave_out_strays())


@contextmanager
def _refused(problem: str, missing: str = "") -> Iterator[None]:
    """Raise `TransferFailed` for what an environment refuses, and `FileNotFoundError` for what is not there, where `missing` says so."""
    try:
        yield
    except ActionRefused as error:
        if missing and error.problem == "NoSuchFile":
            raise FileNotFoundError(missing) from error
        raise TransferFailed(f"{problem}: {error}") from error


def _literal(path: str) -> str:
    """Return a path that means the same with no word of a shell, such as `~`."""
    return path if path.startswith("/") else f"./{path}"


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


def is_gone(error: TangramError) -> bool:
    """Return whether an error says that an environment is not there any more: closed, being closed, or lost."""
    return isinstance(error, ActionLost) or (isinstance(error, ActionFailed) and error.cause in _CLOSED)
