"""The command line as a person uses it: commands in a folder with a stack of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]


def environment(folder: Path) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TANGRAM_")}
    own = {"TANGRAM_STATE_DIR": str(folder / "state")}
    if (folder / "services.toml").exists():
        own["TANGRAM_SERVICES_FILE"] = str(folder / "services.toml")
    return {**clean, **own, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


def tangram(folder: Path, *words: str, timeout_s: float = 200.0) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "tangram", *words]
    return subprocess.run(argv, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=timeout_s, check=False)


@contextmanager
def started(folder: Path, *words: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Run a command in the background, with more variables; where the test did not end it, it is told to end, and its stack with it."""
    argv = [sys.executable, "-m", "tangram", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # Whoever runs these tests in the background of a shell has interrupts ignored, which a child would inherit.
    heard = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(argv, cwd=folder, env={**environment(folder), **variables}, text=True, **pipes)  # type: ignore[call-overload]
    finally:
        signal.signal(signal.SIGINT, heard)
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
            if process.environ().get("TANGRAM_STATE_DIR") == str(folder / "state") or str(folder) in " ".join(process.cmdline()):
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found
