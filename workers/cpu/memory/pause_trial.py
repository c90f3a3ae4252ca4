"""Tries whether environments can be paused for want of memory here: a program is, in a group of its own, and goes on."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Literal

from workers.cpu import control_files
from workers.cpu.memory.allowance import Allowance
from workers.cpu.memory.controls import Controls, ControlsV1, ControlsV2
from workers.cpu.memory.watcher import Watcher

LIMIT_MB, GRANT_MB, TAKEN_MB = 192, 16, 128
"""More is taken than the kernel gives before the watcher looks."""
WAIT_S, POLL_S = 30.0, 0.05
"""How long all of it may take. A busy machine may need many seconds to start a program; `tangram up` waits for longer than this."""
NO_GROUPS = "this worker may not write control groups for memory"
BY_LIMIT = "the worker was not told to pause environments"

Memory = Literal["fixed", "elastic"]
"""What bounds the memory of environments: nothing but their limit, or their limit and an allowance below it."""


def problem_of(memory: str, freezer: str | None, *, is_v2: bool) -> str:
    """Return why environments cannot be paused by groups such as these, which are made for the trial; nothing where they can."""
    if not is_v2 and freezer is None:
        return "there is no group in which programs can be frozen"
    try:
        with _made(memory, freezer) as folders:
            controls = ControlsV2(memory) if is_v2 else ControlsV1(memory, folders[-1])
            return _tried(controls, folders)
    except OSError as error:
        return f"control groups do not do what is needed: {error}"


@contextmanager
def _made(memory: str, freezer: str | None) -> Iterator[list[str]]:
    folders = [memory, *filter(None, [freezer])]
    try:
        for folder in folders:
            os.makedirs(folder, exist_ok=True)
        yield folders
    finally:
        for folder in folders:
            control_files.is_removed(folder)


def _tried(controls: Controls, folders: list[str]) -> str:
    """Have a program take more than it is granted; return what did not happen that should."""
    paused = threading.Event()
    takes = [sys.executable, "-I", "-S", "-c", f"print(len(bytearray({TAKEN_MB} << 20)))"]
    with closing(Watcher()) as watcher, closing(Allowance("trial", LIMIT_MB, controls, watcher)) as allowance:
        watcher.on_wanted = lambda report: paused.set()
        argv = ["/bin/sh", "-c", 'read -r line; exec "$@"', "sh", *takes]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            try:
                for folder in folders:
                    control_files.write(f"{folder}/cgroup.procs", str(child.pid))
                with allowance.action(GRANT_MB, (1, 1)):
                    assert child.stdin is not None
                    child.stdin.write(b"\n")
                    child.stdin.flush()
                    until = time.monotonic() + WAIT_S
                    while not paused.wait(POLL_S):
                        if child.poll() is not None or time.monotonic() > until:
                            return "a program was not paused"
                    allowance.allow(LIMIT_MB, (1, 2))
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        said, _ = child.communicate(timeout=max(0.0, until - time.monotonic()))
                        return "" if said == f"{TAKEN_MB << 20}\n".encode() else "a program that was paused did not end well"
                return "a program that was paused did not go on"
            finally:
                allowance.close()  # What is frozen does not die.
                child.kill()
