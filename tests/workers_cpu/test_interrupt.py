"""Interrupts at the moments at which bash loses them, which a slow machine draws out."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.needed import needed
from tests.workers_cpu.conftest import make
from tests.workers_cpu.support import Followed, followed, until
from workers.cpu.abstract import EnvironmentSpec, Signal
from workers.cpu.process import tree

MOMENTS = Path(__file__).with_name("moments.c")

AtMoment = Callable[[str, str], Followed]


@pytest.fixture
def at_moment(tmp_path: Path) -> Iterator[AtMoment]:
    """Return what starts a command in a bash that is held at a moment of `moments.c`, interrupts it then, and returns it."""
    needed("" if shutil.which("cc") and shutil.which("bash") else "needs gcc, libc6-dev and bash")
    library, bash = tmp_path / "moments.so", tmp_path / "bash"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, MOMENTS, "-ldl"], check=True)
    with ExitStack() as stack:

        def interrupt(moment: str, command: str) -> Followed:
            bash.write_text(f'#!/bin/sh\nexec env LD_PRELOAD={library} MOMENTS={tmp_path} MOMENT={moment} {shutil.which("bash")} "$@"\n')
            bash.chmod(0o755)
            box = stack.enter_context(closing(make(tmp_path / "box", "none", shell=str(bash))))
            env = stack.enter_context(closing(box.open(EnvironmentSpec(id="e"))))
            one = stack.enter_context(followed(env, f": >{tmp_path}/armed; {command}"))
            assert until((tmp_path / moment).exists)
            one.execution.give(Signal(signal.SIGINT))
            return one

        yield interrupt


def test_a_shell_that_an_interrupt_meets_as_it_begins_to_wait_ends_all_the_same(at_moment: AtMoment) -> None:
    one = at_moment("waiting", "echo ready; sleep 300; echo after")
    assert (one.outcome().status, one.outcome().stdout, one.outcome().exit_code) == ("succeeded", b"ready\n", 130)


def test_a_process_that_takes_long_from_fork_to_exec_is_interrupted_as_a_program(at_moment: AtMoment, tmp_path: Path) -> None:
    # Given a shell with a trap, and a process that is about to take the interrupt for the shell's, and has a long way to its exec
    one = at_moment("forked", "trap 'echo caught; exit 9' INT; sleep 300; echo after")
    pid = int((tmp_path / "forked").read_text())

    def stopped() -> tree.Process | None:
        copy = tree.read_process(pid)
        return copy if copy is not None and copy.state == "T" else None

    assert until(lambda: stopped() is not None)
    time.sleep(1.0)
    # When it goes on
    if copy := stopped():
        tree.send(copy, signal.SIGCONT)
    # Then the program is interrupted, and the shell's trap carried out
    assert (one.outcome().stdout, one.outcome().exit_code) == (b"caught\n", 9)
