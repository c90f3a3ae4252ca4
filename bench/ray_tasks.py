"""What Ray's workers do in `bench.ray_replay`: environments, files and commands, as a process sandbox of ours has them.

Plain functions; the driver makes Ray tasks of them. A trajectory's environment is a folder with `work`, where commands
start and which is their home, and `tmp`. A command gets the same shell and the same variables as under Tangram.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from workers.cpu.dop import MOST_VARIABLE, with_dop


@dataclass(frozen=True, slots=True)
class Done:
    """How a task ended: the exit code, None for a command that was killed for its time; seconds of it and of CPU."""

    exit_code: int | None
    execution_s: float
    cpu_s: float


def open_environment(root: str, files: Mapping[str, bytes]) -> None:
    """Make the folders and write the starting files."""
    for name in ("work", "tmp"):
        os.makedirs(os.path.join(root, name))
    for path, content in files.items():
        _write(Path(root, "work", path), content)


def close_environment(root: str) -> None:
    """Remove the folders."""
    shutil.rmtree(root)


def read_file(root: str, path: str) -> Done:
    """Read a file of the environment."""
    began = time.perf_counter()
    Path(root, "work", path).read_bytes()
    return Done(0, time.perf_counter() - began, 0.0)


def write_file(root: str, path: str, text: str) -> Done:
    """Write a file of the environment."""
    began = time.perf_counter()
    _write(Path(root, "work", path), text.encode())
    return Done(0, time.perf_counter() - began, 0.0)


def run_command(root: str, command: str, units: int, timeout_s: float | None, search_path: str) -> Done:
    """Run a command in the work folder, told that it has `units` cores."""
    shell = shutil.which("bash", path=search_path) or "/bin/sh"
    own = {"PATH": search_path, "HOME": f"{root}/work", "TMPDIR": f"{root}/tmp", "LANG": "C.UTF-8", "TERM": "dumb", "SHELL": shell}
    own[MOST_VARIABLE] = str(units)
    used, began = _children_s(), time.perf_counter()
    exit_code: int | None
    with subprocess.Popen(
        [shell, "-c", command],
        cwd=f"{root}/work",
        env=with_dop(units, own),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as running:
        try:
            running.communicate(timeout=timeout_s)
            exit_code = running.returncode
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            running.communicate()
            exit_code = None
    return Done(exit_code, time.perf_counter() - began, _children_s() - used)


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
