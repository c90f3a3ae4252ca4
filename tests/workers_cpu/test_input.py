"""What a running command is given: input, its end, signals, a terminal."""

from __future__ import annotations

import signal

from workers.cpu.abstract import Data, Signal, WindowSize
from workers.cpu.process.environment import ProcessEnvironment

from .support import RUN, followed, processes_with, sleepers


def test_an_interactive_shell_has_job_control_and_ends_with_all_that_it_started(env: ProcessEnvironment) -> None:
    job, waiting = f"312.828125{RUN}", f"312.84375{RUN}"
    with followed(env, "bash --norc -i", terminal=WindowSize(24, 80)) as one:
        one.execution.give(Data(f"PS1=; sleep {job} & echo job $((40+2))\n".encode()))
        assert one.prints("job 42") and sleepers(job)
        # A control-C before the program is in the foreground is the shell's, at any terminal
        one.execution.give(Data(f"sh -c 'echo waits $((40+3)); exec sleep {waiting}'\n".encode()))
        assert one.prints("waits 43")
        one.execution.give(Signal(signal.SIGINT))
        one.execution.give(Data(b"jobs; exit 5\nexit 5\n"))
        outcome = one.outcome()
        assert outcome.exit_code == 5 and b"no job control" not in outcome.stdout and f"sleep {job} &".encode() in outcome.stdout
    assert not processes_with(job) and not processes_with(waiting)


def test_a_long_output_at_a_terminal_is_whole(env: ProcessEnvironment) -> None:
    with followed(env, "head -c 300000 /dev/zero | tr '\\0' x; echo end", terminal=WindowSize(24, 80)) as one:
        assert one.outcome().stdout == one.seen["stdout"] == b"x" * 300_000 + b"end\r\n"
