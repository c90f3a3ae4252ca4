"""The command line as a person uses it: commands in a folder with a stack of its own."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.cli.forked import environment
from tests.cli.template import PROGRAM, Forked


def tangram(
    folder: Path, *words: str, stdout: int = subprocess.PIPE, timeout_s: float = 200.0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, with more variables."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": stdout, "stderr": subprocess.PIPE}
    return finished(Forked([*PROGRAM, *words], cwd=folder, env=environment(folder, **variables), text=True, **pipes), timeout_s)


def finished(process: subprocess.Popen[str], timeout_s: float = 200.0) -> subprocess.CompletedProcess[str]:
    """Wait for a command; end it when its time is over."""
    with process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@contextmanager
def started(folder: Path, *words: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Run a command in the background, with more variables; where the test did not end it, it is told to end, and its stack with it."""
    argv = [*PROGRAM, *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = Forked(argv, cwd=folder, env=environment(folder, **variables), text=True, **pipes)
    try:
        yield process
    finally:
        process.terminate()
        process.send_signal(signal.SIGCONT)  # a test that failed may have left it stopped
        try:
            process.wait(200)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
            process.stderr.close()


def leftovers(folder: Path) -> list[str]:
    """List the processes that belong to the folder."""
    found = []
    for process in psutil.process_iter():
        try:
            # A fork shows the variables of its template.
            state = str(folder) if process.cwd() == str(folder) else process.environ().get("TANGRAM_STATE_DIR", "")
            if state in (str(folder), str(folder / "state")) or str(folder) in " ".join(process.cmdline()):
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found
