"""Keeps a server from outliving its worker. A program of its own, run by file name; it imports nothing but the standard library.

    python guard.py FOLDER GRACE_S COMMAND…

It runs the command in a session of its own and ends when the command ends, with its exit code, or 128 and its signal. Standard input is
a pipe that the worker holds. When the pipe closes, in whatever way the worker ended, the command gets SIGTERM, and SIGKILL after
GRACE_S seconds. Before the guard exits, it kills every process that the command left and removes FOLDER. Otherwise such a process would
keep its GPU memory.

FOLDER is the working directory and the `TMPDIR` of the guard, and so of all that it starts. `processes_of` finds them by it. The worker
calls `end_processes` too, for a guard that was killed.

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
_POLL_S = 0.02
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
    while end_processes(folder) or not _reap():
        time.sleep(_POLL_S)
    shutil.rmtree(folder, ignore_errors=True)
    return code if code >= 0 else 128 - code


def end_processes(folder: str, within_s: float = 0.0) -> list[int]:
    """Kill the processes of a server, again and again until none is left or `within_s` seconds are over; at least once.

    Returns the ids of those that were last seen. Processes that fork faster than they are found may be among them, and those that a
    driver does not let go.
    """
    deadline = time.monotonic() + within_s
    while True:
        left = []
        for pid in processes_of(folder):
            left.append(pid)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(_POLL_S)


def processes_of(folder: str) -> Iterator[int]:
    """Find this user's living processes that belong to a server, apart from the caller; their ids come as they are found.

    A process belongs to it if it works in the folder, if its environment has the folder as `TMPDIR`, or if its parent belongs to it.
    No single mark lasts: vLLM's processes overwrite the environment that the kernel shows when they change their titles, any process
    can change its directory, and a process whose parent has ended has another.
    """
    parents, marked = {}, set()
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()] if os.path.isdir("/proc") else []
    # The last first, as a process that forks and ends again and again is gone before a long list is through.
    for pid in sorted(pids, reverse=True):
        try:
            status = dict(line.partition(":")[::2] for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines())
            if status["State"].split()[0] in "ZX" or int(status["Uid"].split()[0]) != os.getuid():
                continue
            parents[pid] = int(status["PPid"])
        except (OSError, LookupError):
            continue  # it has just ended
        if _is_marked(pid, folder):
            marked.add(pid)
            if pid != os.getpid():
                yield pid
    while below := {pid for pid, parent in parents.items() if parent in marked and pid not in marked}:
        marked |= below
        yield from below - {os.getpid()}


def _is_marked(pid: int, folder: str) -> bool:
    with contextlib.suppress(OSError):
        if f"{os.readlink(f'/proc/{pid}/cwd').removesuffix(' (deleted)')}/".startswith(f"{folder}/"):
            return True
    with contextlib.suppress(OSError):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return any((variable + b"/").startswith(b"TMPDIR=%s/" % os.fsencode(folder)) for variable in variables)
    return False


def _end_with_worker(child: subprocess.Popen[bytes], grace_s: float) -> None:
    while os.read(0, 1):
        pass
    child.terminate()
    try:
        child.wait(grace_s)
    except subprocess.TimeoutExpired:
        child.kill()


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
    """Have the kernel kill the command when this guard is killed, which then can do nothing itself; its children are not killed so."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _reap() -> bool:
    """Take note of the children that have ended; say whether none is left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return True
    return False


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
