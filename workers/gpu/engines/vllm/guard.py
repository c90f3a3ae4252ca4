"""Keeps a server from outliving its worker. A program of its own, run by file name; it imports nothing but the standard library.

    python guard.py FOLDER GRACE_S COMMAND…

It runs the command in a session of its own and ends when the command ends, with its exit code, or 128 and its signal. Standard input is
a pipe that the worker holds. When the pipe closes, in whatever way the worker ended, the command gets SIGTERM, and SIGKILL after
GRACE_S seconds. Before the guard exits, it kills every process that the command left and removes FOLDER. Otherwise such a process would
keep its GPU memory.

Standard output is the command's log, opened for appending. Whenever it has grown beyond MOST_LOG, its older half goes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

MOST_LOG = 64 << 20
"""Bytes of a log."""

_LOOK_AT_LOG_S = 10.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main(words: Sequence[str]) -> int:
    """Run the command until it ends or the worker has gone."""
    folder, grace_s, command = words[0], float(words[1]), words[2:]
    # What the command leaves behind becomes a child of this process and can be found.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_parent)
    threading.Thread(target=_end_with_worker, args=(child, grace_s), daemon=True).start()
    threading.Thread(target=_keep_log_bounded, daemon=True).start()
    code = child.wait()
    _kill_group(child.pid)
    _kill_children()
    shutil.rmtree(folder, ignore_errors=True)
    return code if code >= 0 else 128 - code


def _end_with_worker(child: subprocess.Popen[bytes], grace_s: float) -> None:
    while os.read(0, 1):
        pass
    child.terminate()
    try:
        child.wait(grace_s)
    except subprocess.TimeoutExpired:
        _kill_group(child.pid)


def bound_log(log: int, most: int = MOST_LOG) -> None:
    """Cut a log, a file open for appending, down to the lines of its last half if it is larger than `most` bytes."""
    size = os.fstat(log).st_size
    if size <= most:
        return
    reader = os.open(f"/proc/self/fd/{log}", os.O_RDONLY)
    try:
        kept = os.pread(reader, most // 2, size - most // 2)
    finally:
        os.close(reader)
    os.ftruncate(log, 0)
    os.write(log, b"(older lines were cut)\n" + kept.partition(b"\n")[2])


def _keep_log_bounded() -> None:
    while True:
        time.sleep(_LOOK_AT_LOG_S)
        # A full disk, or a system without /proc: no reason to lose the server.
        with contextlib.suppress(OSError):
            bound_log(1)


def _die_with_parent() -> None:
    """Have the kernel kill the command when this guard is killed, which then can do nothing itself."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _kill_group(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def _kill_children() -> None:
    """Kill and reap until there is no child left; a killed one's own children become ours."""
    while True:
        for pid in _children():
            os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> Iterator[int]:
    me = str(os.getpid())
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name in brackets may hold anything; what follows it is state and parent.
            parent = stat.read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue
        if parent == me:
            yield int(stat.parent.name)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
