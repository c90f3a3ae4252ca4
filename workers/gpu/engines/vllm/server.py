"""A server's process: started under a guard, with a folder and a log of its own; ended without leftovers.

The folder is the working directory and the `TMPDIR` of all processes of the server, which are found by it. It is readable by this user
alone and holds the Unix socket on which the server listens. So nobody else on the machine can reach the calls that put it to sleep, which
vLLM's own key does not protect. The folder lies in the machine's folder for temporary files, since the path of a socket may not be long.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from workers.gpu.engines.vllm import guard
from workers.gpu.engines.vllm.folders import make_folder

GRACE_S = 5.0
"""Seconds that a server has to end by itself before it is killed."""

_END_S = 30.0
_TAIL_BYTES = 64 * 1024
_TAIL_LENGTH = 160
_ERROR = re.compile(r"\b\w*(Error|Exception)\b: ")
# Warnings quote errors, vLLM's last words name no cause, and each of its lines begins with process, level, time and place.
_SAYS_NOTHING = (" INFO ", " WARNING ", "root cause above", "CancelledError")
_PREFIX = re.compile(r"^(\([^)]*\) )?([A-Z]+ [-0-9]+ [:0-9]+ \[[^]]*\] )?")


class Server:
    """A running server. Safe for many threads."""

    def __init__(self, log: Path, command: Callable[[Path], Sequence[str]], env: Mapping[str, str]) -> None:
        """Start `command(socket)` with the environment `env` and `TMPDIR`; what it prints goes to `log`, the last run's is kept beside it.

        The folder of the log is the worker's, by which a later worker recognises servers that this one left.

        Raises `OSError` where it cannot be started.
        """
        self.log = log
        self._folder = make_folder(log.parent)
        self.socket = self._folder / "http"
        try:
            self._guard = self._begun(command(self.socket), env)
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def _begun(self, command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        with suppress(FileNotFoundError):
            self.log.replace(self.log.with_name(self.log.name + ".1"))
        words = [sys.executable, "-I", str(guard.__file__), str(self._folder), str(GRACE_S), *command]
        # Appended to, so that the guard can cut it.
        with self.log.open("ab") as output:
            self._log_inode = os.fstat(output.fileno()).st_ino
            return subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**env, "TMPDIR": str(self._folder)},
                cwd=self._folder,
                start_new_session=True,
            )

    def watch(self, on_end: Callable[[], None]) -> None:
        """Call `on_end` from a thread of its own once the server has ended and all its processes are gone, or cannot be ended."""

        def wait() -> None:
            self._guard.wait()
            self.ended(_END_S)
            on_end()

        threading.Thread(target=wait, name="tangram-vllm-watch", daemon=True).start()

    def ended(self, within_s: float = 0.0) -> str | None:
        """Say how the server ended, e.g. `exit code 1`, at once or within some seconds; None as long as any of its processes runs."""
        deadline = time.monotonic() + within_s
        with suppress(subprocess.TimeoutExpired):
            self._guard.wait(within_s)
        code = self._guard.returncode
        if code is None or not self._cleared(deadline - time.monotonic()):
            return None
        return f"exit code {code}" if 0 <= code < 128 else f"signal {_signal(code - 128 if code > 0 else -code)}"

    def _cleared(self, within_s: float) -> bool:
        """Say whether nothing is left of the server once its guard has ended; kill what is, as a guard that was killed cannot.

        A guard removes the folder when it has done so itself.
        """
        if not self._folder.exists():
            return True
        if guard.end_processes(str(self._folder), within_s):
            return False
        shutil.rmtree(self._folder, ignore_errors=True)
        return True

    def tail(self) -> str:
        """Return in one line what the server printed last: the last error it named, or its last line; and where the rest is."""
        found, path = "", self._own_log()
        with suppress(OSError), path.open("rb") as log:
            log.seek(max(0, log.seek(0, 2) - _TAIL_BYTES))
            lines = [" ".join(line.split()) for line in log.read().decode("utf-8", "replace").splitlines() if line.strip()]
            errors = [line for line in lines if _ERROR.search(line) and not any(words in line for words in _SAYS_NOTHING)]
            found = (errors or lines or [""])[-1]
        return f"{_PREFIX.sub('', found)[-_TAIL_LENGTH:] or 'it printed nothing'} (log: {path})"

    def _own_log(self) -> Path:
        """Return where this server's log is now: a worker beside this one may have a service and cells of the same names."""
        before = self.log.with_name(self.log.name + ".1")
        with suppress(OSError):
            return before if before.stat().st_ino == self._log_inode else self.log
        return self.log

    def processes(self) -> list[psutil.Process]:
        """Return the server's processes that live, the one that listens first."""
        with suppress(psutil.Error):
            return psutil.Process(self._guard.pid).children(recursive=True)
        return []

    def stop(self) -> None:
        """End the server and wait until all of its processes are gone; idempotent.

        Raises `TimeoutError` where they are not after half a minute, which a driver may do to a process in the GPU.
        """
        if self._guard.stdin is not None:
            with suppress(OSError):
                self._guard.stdin.close()
        if self.ended(GRACE_S + _END_S) is None and (left := list(guard.processes_of(str(self._folder)))):
            raise TimeoutError(f"processes {', '.join(map(str, left))} of its server cannot be ended")


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
