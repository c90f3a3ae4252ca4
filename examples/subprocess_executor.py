"""Records scripted rollouts without a running system: commands are processes of this machine, in a folder of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from app.replay.recorder import Outcome, RecordError
from scheduler.sim.trace import TraceAction

KEPT_OUTPUT_BYTES = 2**16


class SubprocessExecutor:
    """Carries out commands as processes of this machine, in a folder of its own; gpu and api actions not at all.

    For scripts that one trusts: nothing keeps a command inside the folder.
    """

    def __init__(self, folder: Path, environ: Mapping[str, str] = os.environ) -> None:
        """Work in `folder`, which is there and empty; `environ` says where programs are found."""
        self._folder = folder
        # The commands' `python3` is the interpreter that records, also outside of an activated virtual environment.
        self._path = os.pathsep.join([str(Path(sys.executable).parent), environ.get("PATH", os.defpath)])

    def upload(self, path: str, content: bytes) -> None:
        """Put a starting file in place."""
        self.write_file(path, content)

    def exec(self, command: str, *, units: int, timeout_s: float) -> Outcome:
        """Run `command` in a shell and a process group of its own, which ends with it; exit code 124 past the timeout."""
        late = threading.Event()
        with tempfile.TemporaryFile() as output:
            started = time.perf_counter()
            process = subprocess.Popen(
                ["sh", "-c", command], cwd=self._folder, env=self._environment(units), start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
            timer = threading.Timer(timeout_s, _end_late, (late, process.pid))
            timer.start()
            try:
                # wait4 gives the core-seconds of this command alone, with all the descendants it has waited for.
                _, status, used = os.wait4(process.pid, 0)
                execution_s = time.perf_counter() - started
                process.returncode = os.waitstatus_to_exitcode(status)
            finally:
                timer.cancel()
                _kill_group(process.pid)
            output.seek(max(output.seek(0, os.SEEK_END) - KEPT_OUTPUT_BYTES, 0))
            said = output.read().decode(errors="replace")
        exit_code = 124 if late.is_set() else process.returncode
        return Outcome(execution_s=execution_s, cpu_s=used.ru_utime + used.ru_stime, exit_code=exit_code, output=said)

    def read_file(self, path: str) -> Outcome:
        """Read a file; exit code 1 where it is not there."""
        started = time.perf_counter()
        try:
            self._inside(path).read_bytes()
        except OSError as error:
            return Outcome(execution_s=time.perf_counter() - started, exit_code=1, output=str(error))
        return Outcome(execution_s=time.perf_counter() - started)

    def write_file(self, path: str, content: bytes) -> Outcome:
        """Write a file, with its folders."""
        started = time.perf_counter()
        target = self._inside(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        return Outcome(execution_s=time.perf_counter() - started)

    def outside(self, action: TraceAction) -> Outcome | None:
        """Carry out nothing: there is neither service nor API here."""
        return None

    def _inside(self, path: str) -> Path:
        target = (self._folder / path).resolve()
        if not target.is_relative_to(self._folder.resolve()):
            raise RecordError(f"{path} is outside of the environment")
        return target

    def _environment(self, units: int) -> dict[str, str]:
        amounts = {"TANGRAM_DOP": str(units), "TANGRAM_DOP_MAX": str(units), "OMP_NUM_THREADS": str(units), "MAKEFLAGS": f"-j{units}"}
        return {"PATH": self._path, "HOME": str(self._folder), "LANG": "C.UTF-8", **amounts}


def _end_late(late: threading.Event, group: int) -> None:
    late.set()
    _kill_group(group)


def _kill_group(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
