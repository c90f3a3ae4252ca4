"""The folders of servers, by whose names a starting worker recognises what workers before it left running.

    tangram-vllm-MARK-PID-START-RANDOM

MARK stands for the worker's state folder and its PID namespace, PID and START (clock ticks since boot) for the worker itself. All is in
the name, as a folder is then never there without it. Folders of other users are left alone, whatever their names say.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from workers.gpu.engines.vllm import guard

# The path of a socket has 107 bytes, and those that vLLM makes itself in `TMPDIR` have names of 36.
_LONGEST_FOLDER = 68
_SHORT = "/tmp"
_END_S = 10.0

log = logging.getLogger(__name__)


def make_folder(state_dir: Path) -> Path:
    """Make a server's folder where temporary files go, or in `/tmp` where that leaves too little room for the names of sockets."""
    me = os.getpid()
    prefix = f"{_prefix(state_dir)}{me}-{_started(me) or 0}-"
    folder = Path(tempfile.mkdtemp(prefix=prefix)).resolve()
    if len(os.fsencode(folder)) <= _LONGEST_FOLDER:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix=prefix, dir=_SHORT)).resolve()


def end_leftovers(state_dir: Path) -> list[int]:
    """End the servers that dead workers with this state folder left, their guards included, and remove their folders.

    Returns the ids of the processes that were found. Servers of a worker that lives are left alone. A process that cannot be ended within
    10 s is named in the log, and its folder stays for the next worker.
    """
    found: list[int] = []
    for folder in _left(_prefix(state_dir)):
        found += guard.processes_of(str(folder))
        if stuck := guard.end_processes(str(folder), _END_S):
            log.error("processes %s, left by a worker that is gone, cannot be ended and may hold GPU memory", ", ".join(map(str, stuck)))
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return found


def _left(prefix: str) -> Iterator[Path]:
    """Return this user's folders whose workers are gone, also those that were removed while processes work in them."""
    if sys.platform != "linux":
        return  # without /proc, nothing says what belongs to a folder
    name = re.compile(re.escape(prefix) + r"(\d+)-(\d+)-[^-]+")
    parents = {Path(tempfile.gettempdir()).resolve(), Path(_SHORT).resolve()}
    for folder in {folder for parent in parents for folder in parent.glob(f"{prefix}*")} | set(_worked_in(parents, prefix)):
        said = name.fullmatch(folder.name)
        try:
            there = folder.lstat()
            mine = stat.S_ISDIR(there.st_mode) and there.st_uid == os.getuid()
        except FileNotFoundError:
            mine = True  # only its processes are left, of which only this user's count
        if said and mine and _started(int(said[1])) != int(said[2]):
            yield folder


def _worked_in(parents: Collection[Path], prefix: str) -> Iterator[Path]:
    """Return the folders in which processes work, also those that somebody has removed."""
    for cwd in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):
            folder = Path(os.readlink(cwd).removesuffix(" (deleted)"))
            if folder.parent in parents and folder.name.startswith(prefix):
                yield folder


def _prefix(state_dir: Path) -> str:
    said = os.fsencode(state_dir.resolve())
    with suppress(OSError):
        # The ids of another namespace, such as that of a container with the same folders, say nothing here.
        said += b"\0" + os.fsencode(os.readlink("/proc/self/ns/pid"))
    return f"tangram-vllm-{hashlib.sha256(said).hexdigest()[:8]}-"


def _started(pid: int) -> int | None:
    """Return when a living process was started, in clock ticks since boot, which no change of the clock moves; None where it is gone."""
    try:
        # The name in brackets may hold anything; what follows it begins with the state, and the start is field 22 of all.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
