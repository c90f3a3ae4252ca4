"""What a running command is given: input, its end, signals, a terminal."""

from __future__ import annotations

import signal

import pytest

from tests.workers_cpu.support import RUN, admit, followed, printed, processes_with, run, sleepers
from workers.cpu.abstract import Data, EndOfInput, Environment, ExecRequest, Signal, WindowSize
from workers.cpu.shell.streams import MOST_INPUT

TERMINAL = WindowSize(24, 80)


def test_output_is_handed_on_as_it_comes_and_kept_too(shell_env: Environment) -> None:
    with followed(shell_env, "echo out; echo err >&2; until [ -e go ]; do sleep 0.01; done; echo end") as one:
        assert one.prints("out\n") and one.prints("err\n", "stderr")
        assert not one.outcomes
        shell_env.write_file("go", b"")
        assert (one.outcome().stdout, one.outcome().stderr) == (one.seen["stdout"], one.seen["stderr"]) == (b"out\nend\n", b"err\n")


def test_input_is_read_in_order_and_its_end_ends_the_reader(shell_env: Environment) -> None:
    with followed(shell_env, "cat; echo over", stdin=True) as one:
        one.execution.give(Data(b"early\n"))
        assert one.prints("early\n")
        for number in range(100):
            one.execution.give(Data(b"%d\n" % number))
        one.execution.give(EndOfInput())
        assert one.outcome().stdout == b"early\n" + b"".join(b"%d\n" % number for number in range(100)) + b"over\n"


def test_input_that_ended_before_the_command_began_is_whole(env: Environment) -> None:
    execution = env.start(ExecRequest(action_id="a", command="wc -c", stdin=True, timeout_s=60))
    execution.give(Data(b"x" * 1_000_000))
    execution.give(EndOfInput())
    assert execution.wait().stdout.split() == [b"1000000"]


def test_input_goes_to_its_own_command_alone(env: Environment) -> None:
    with followed(env, "sleep 300 & read line; echo $line", stdin=True) as one:
        one.execution.give(Data(b"mine\nleft\n"))
        assert one.outcome().stdout == b"mine\n"
    with followed(env, "cat", stdin=True) as two:
        two.execution.give(EndOfInput())
        assert two.outcome().stdout == b""
    assert printed(env, "cat") == ""


def test_input_without_end_that_nobody_reads_ends_the_command(env: Environment) -> None:
    with followed(env, "sleep 300", stdin=True) as one:
        for _ in range(MOST_INPUT // (64 << 10) + 2):
            one.execution.give(Data(b"x" * (64 << 10)))
        assert (one.outcome().status, "did not read its input" in one.outcome().reason) == ("failed", True)


def test_a_signal_reaches_the_program_and_not_the_shell_above_it(shell_env: Environment) -> None:
    printed(shell_env, "export KEPT=kept")
    with followed(shell_env, "sh -c 'trap \"exit 7\" TERM; echo ready; while :; do sleep 0.01; done'") as one:
        assert one.prints("ready\n")
        one.execution.give(Signal(signal.SIGTERM))
        assert (one.outcome().status, one.outcome().exit_code) == ("succeeded", 7)
    assert printed(shell_env, "echo $KEPT") == "kept\n"


def test_a_trap_of_the_command_line_gets_its_signal(shell_env: Environment) -> None:
    with followed(shell_env, "trap 'echo caught; go=1' USR1; echo ready; until [ $go ]; do sleep 0.01; done; true") as one:
        assert one.prints("ready\n")
        one.execution.give(Signal(signal.SIGUSR1))
        assert one.prints("caught\n") and one.outcome().exit_code == 0


def test_a_signal_ends_a_whole_command_line_and_nothing_that_was_there_before(env: Environment) -> None:
    left = printed(env, "sleep 300 >/dev/null 2>&1 & echo $!").strip()
    with followed(env, "echo ready; sleep 300; echo after") as one:
        assert one.prints("ready\n")
        one.execution.give(Signal(signal.SIGKILL))
        assert (one.outcome().stdout, one.outcome().exit_code) == (b"ready\n", 137)
    assert run(env, f"kill -0 {left}").exit_code == 0


def test_an_interrupt_ends_a_command_line_that_has_just_started_a_process(bash_env: Environment) -> None:
    for _ in range(40):
        with followed(bash_env, "echo ready; sleep 300; echo after") as one:
            assert one.prints("ready\n")
            one.execution.give(Signal(signal.SIGINT))
            assert (one.outcome().stdout, one.outcome().exit_code) == (b"ready\n", 130)


def test_a_terminal_is_one(shell_env: Environment) -> None:
    command = "test -t 0 && test -t 1 && test -t 2 && stty size && echo $TERM; read line; echo got $line; stty size"
    with followed(shell_env, command, terminal=WindowSize(30, 100)) as one:
        assert one.prints("30 100\r\nxterm-256color\r\n")
        one.execution.give(WindowSize(31, 101))
        one.execution.give(Data(b"typed\n"))
        outcome = one.outcome()
        assert (outcome.status, outcome.exit_code, outcome.stderr) == ("succeeded", 0, b"")
        assert outcome.stdout.endswith(b"typed\r\ngot typed\r\n31 101\r\n")


def test_a_session_keeps_its_state_over_a_terminal(shell_env: Environment) -> None:
    command = "export KEPT=kept; mkdir deep; cd deep; exit_code() { return 3; }; exit_code"
    with followed(shell_env, command, terminal=TERMINAL) as one:
        assert (one.outcome().status, one.outcome().exit_code) == ("succeeded", 3)
    assert printed(shell_env, "echo $KEPT ${PWD##*/}; test -t 0 || echo none") == "kept deep\nnone\n"


@pytest.mark.parametrize("interpreter", [None, ("sh", "-c")], ids=["command line", "program"])
def test_control_c_and_control_d_at_a_terminal(shell_env: Environment, interpreter: tuple[str, ...] | None) -> None:
    # What is ready is a program that the interrupt ends: a shell between fork and exec would take it for its own
    with followed(shell_env, "sh -c 'echo ready; exec sleep 300'", interpreter=interpreter, terminal=TERMINAL) as one:
        assert one.prints("ready\r\n")
        one.execution.give(Signal(signal.SIGINT))
        assert one.outcome().exit_code == 130
    with followed(shell_env, "cat", interpreter=interpreter, terminal=TERMINAL) as one:
        one.execution.give(EndOfInput())
        assert one.outcome().exit_code == 0


@pytest.mark.parametrize("key", [b"\x03", b"\x1c"], ids=["control-C", "control-backslash"])
def test_a_program_at_a_terminal_may_catch_what_is_typed_and_end_as_it_likes(shell_env: Environment, key: bytes) -> None:
    command = "trap 'echo caught; go=1' INT QUIT; echo ready; until [ $go ]; do sleep 0.01; done; exit 4"
    with followed(shell_env, command, interpreter=("sh", "-c"), terminal=TERMINAL) as one:
        assert one.prints("ready\r\n")
        one.execution.give(Data(key))
        assert one.prints("caught\r\n") and one.outcome().exit_code == 4


def test_a_terminal_ends_with_a_cancel(env: Environment) -> None:
    with followed(env, "echo ready; trap '' HUP INT TERM; sleep 300", terminal=TERMINAL) as one:
        assert one.prints("ready\r\n")
        one.execution.kill("enough")
        assert (one.outcome().status, one.outcome().reason) == ("cancelled", "enough")


@pytest.mark.parametrize("place", ["process"])
@pytest.mark.parametrize(
    ("interpreter", "command"), [(None, "bash --norc -i"), (("bash", "--norc"), "-i")], ids=["command line", "program"]
)
def test_an_interactive_shell_has_job_control_and_ends_with_all_that_it_started(
    env: Environment, interpreter: tuple[str, ...] | None, command: str
) -> None:
    job, waiting = f"312.828125{RUN}", f"312.84375{RUN}"
    with followed(env, command, interpreter=interpreter, terminal=TERMINAL) as one:
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


@pytest.mark.parametrize("place", ["process"])
def test_a_long_output_at_a_terminal_is_whole(env: Environment) -> None:
    with followed(env, "head -c 300000 /dev/zero | tr '\\0' x; echo end", terminal=TERMINAL) as one:
        assert one.outcome().stdout == one.seen["stdout"] == b"x" * 300_000 + b"end\r\n"


def test_what_comes_after_the_end_is_dropped(env: Environment) -> None:
    execution = admit(env, "true")
    outcome = execution.wait()
    for given in (Data(b"late"), EndOfInput(), Signal(signal.SIGKILL), TERMINAL):
        execution.give(given)
    assert execution.wait() is outcome
