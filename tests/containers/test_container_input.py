"""What a command in a container is given while it runs, and what it prints meanwhile."""

from __future__ import annotations

import signal

import pytest

from tests.workers_cpu.support import followed, printed
from workers.cpu.abstract import Data, EndOfInput, Signal, WindowSize
from workers.cpu.docker.environment import ContainerEnvironment


@pytest.fixture
def env(shared: ContainerEnvironment) -> ContainerEnvironment:
    """Give the environment that the tests share."""
    return shared


def test_output_comes_as_it_is_printed_and_input_is_read_to_its_end(env: ContainerEnvironment) -> None:
    with followed(env, "cat; echo over >&2", stdin=True) as one:
        one.execution.give(Data(b"first\n"))
        assert one.prints("first\n") and not one.outcomes
        one.execution.give(Data(b"second\n"))
        one.execution.give(EndOfInput())
        assert (one.outcome().stdout, one.outcome().stderr) == (b"first\nsecond\n", b"over\n")


def test_signals_reach_the_command_and_nothing_that_was_there_before(env: ContainerEnvironment) -> None:
    left = printed(env, "sleep 300 >/dev/null 2>&1 & echo $!").strip()
    # What is ready is a program that the signal ends: a shell between fork and exec would take it for its own.
    with followed(env, "trap 'echo caught' USR1; sh -c 'echo ready; exec sleep 300'; echo after") as one:
        assert one.prints("ready\n")
        one.execution.give(Signal(signal.SIGUSR1))
        assert one.prints("caught\n") and one.prints("after\n")
    with followed(env, "echo ready; sleep 300; echo after") as one:
        assert one.prints("ready\n")
        one.execution.give(Signal(signal.SIGKILL))
        assert (one.outcome().stdout, one.outcome().exit_code) == (b"ready\n", 137)
    assert printed(env, f"kill -0 {left} && echo alive") == "alive\n"


def test_a_command_has_a_terminal_and_its_session_keeps_its_state(env: ContainerEnvironment) -> None:
    command = "export KEPT=kept; test -t 0 && test -t 1 && test -t 2 && stty size; read line; echo got $line; stty size"
    with followed(env, command, terminal=WindowSize(30, 100)) as one:
        assert one.prints("30 100\r\n"), one.seen
        one.execution.give(WindowSize(31, 101))
        one.execution.give(Data(b"typed\n"))
        assert one.outcome().stdout.endswith(b"typed\r\ngot typed\r\n31 101\r\n") and one.outcome().exit_code == 0
    assert printed(env, "echo $KEPT; test -t 0 || echo none") == "kept\nnone\n"


def test_control_c_at_a_terminal_ends_the_program(env: ContainerEnvironment) -> None:
    with followed(env, "sh", terminal=WindowSize(24, 80)) as one:
        one.execution.give(Data(b"exec sh -c \"echo wait''ing; exec sleep 300\"\n"))
        assert one.prints("waiting\r\n"), one.seen
        one.execution.give(Signal(signal.SIGINT))
        assert one.outcome().exit_code == 130
