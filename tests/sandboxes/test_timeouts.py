"""Timeouts and kills end the whole process tree of a command, and nothing else."""

from __future__ import annotations

import threading

import pytest

from tests.workers_cpu.support import RUN, admit, followed, printed, processes_with, sleepers, until
from workers.cpu.abstract import Environment, Holding

from .conftest import params
from .support import Clock
from .test_output import exists

ESCAPES = [
    "sleep {marker}",
    "sleep {marker} | cat",
    "sleep {marker} & sleep {marker} & wait",
    "setsid sleep {marker} & sleep {marker}",
    "(setsid sh -c 'sleep {marker} & sleep {marker} &' &) ; sleep {marker}",
    "sh -c 'trap \"\" TERM INT HUP; sleep {marker}; sleep {marker}'",
    "trap '' TERM; while :; do sleep {marker}; done",
    "sleep {marker} & kill -STOP $$",
    "exec sleep {marker}",
    "env -i setsid nohup sleep {marker} >/dev/null 2>&1 & exec sleep {marker}",
]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Give the clock by which commands run out of time, at which they look often."""
    made = Clock()
    monkeypatch.setattr("workers.cpu.shell.backend.SAMPLE_GROWTH", 1.0)
    monkeypatch.setattr("workers.cpu.shell.run.time", made)
    return made


@pytest.mark.parametrize("command", ESCAPES)
@pytest.mark.parametrize("shell_env", params("process-bash", "process-sh", "bubblewrap-bash", "container-busybox"), indirect=True)
def test_a_kill_ends_every_process_of_the_command(shell_env: Environment, command: str) -> None:
    marker = f"314.0625{RUN}"
    with followed(shell_env, "echo before; " + command.format(marker=marker)) as one:
        assert until(lambda: bool(processes_with(marker)))
        one.execution.kill("the trajectory was dropped")
        one.execution.kill("another reason")
        outcome = one.outcome()
    assert (outcome.status, outcome.reason, outcome.exit_code) == ("cancelled", "the trajectory was dropped", None)
    assert outcome.stdout == b"before\n"
    assert not processes_with(marker)
    assert printed(shell_env, "echo alive") == "alive\n"


def test_a_timeout_ends_the_command_and_keeps_its_output_and_what_was_there_before(shell_env: Environment, clock: Clock) -> None:
    # Given a session with an export and a folder, and a server of an earlier command, with a child of its own
    server, mine = f"314.5{RUN}", f"314.03125{RUN}"
    printed(shell_env, f"mkdir sub; cd sub; export Y=2; sh -c 'sleep {server} & wait' >/dev/null 2>&1 &")
    assert until(lambda: len(processes_with(server)) == 2)
    before = processes_with(server)
    # When a command with daemons, whose shell stands still before something dangerous, runs out of time
    command = f"echo before; setsid sleep {mine} & (sleep {mine} &); kill -STOP $$; touch wrong"
    with followed(shell_env, command, timeout_s=1000) as one:
        assert one.prints("before\n") and sleepers(mine, 2)
        clock.forward(800)
        assert not one.outcomes
        clock.end(200)
        outcome = one.outcome()
    assert (outcome.status, outcome.exit_code, outcome.stdout, outcome.cause) == ("timed_out", None, b"before\n", "timeout")
    assert outcome.reason == "ran longer than 1000 s"
    assert not processes_with(mine)
    assert processes_with(server) == before
    assert printed(shell_env, "ls; basename $PWD; echo $Y") == "sub\n2\n"


@pytest.mark.parametrize(("held_s", "status"), [(1800.0, "succeeded"), (2000.0, "timed_out")])
def test_the_time_for_which_a_command_is_held_for_its_reader_counts_up_to_a_bound(
    env: Environment, clock: Clock, held_s: float, status: str
) -> None:
    # Given a command of 1000 s, whose reader is behind for longer than that
    is_behind = threading.Event()
    is_behind.set()
    with followed(env, "touch begun; head -c 1000000 /dev/zero; echo end", timeout_s=1000, is_held=is_behind.is_set) as one:
        assert until(lambda: exists(env, "begun"))
        if status == "succeeded":
            clock.forward(held_s)
            is_behind.clear()
        else:
            clock.end(held_s)
        outcome = one.outcome()
    # When that was less than twice its time; then it succeeds with all its output, else it has run out of time
    assert (outcome.status, outcome.execution_s >= held_s) == (status, True), outcome
    if status == "succeeded":
        assert len(outcome.stdout) == 1_000_004
    else:
        assert (outcome.reason, outcome.cause) == ("ran longer than 1000 s", "timeout")
    assert printed(env, "echo alive") == "alive\n"


@pytest.mark.parametrize(
    "command", ["while :; do :; done", f"while :; do (setsid sleep 314.9375{RUN} &) ; sleep 0.005; done"], ids=["loop", "forks"]
)
def test_loops_and_fork_storms_are_ended(env: Environment, command: str) -> None:
    assert admit(env, command, timeout_s=0.2).wait().status == "timed_out"
    assert not processes_with(f"314.9375{RUN}")
    assert printed(env, "echo alive") == "alive\n"


def test_a_program_has_a_moment_to_end_by_itself(env: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a program that says goodbye on SIGTERM, and a moment that a busy machine does not use up
    monkeypatch.setattr("workers.cpu.shell.run.GRACE_S", 60.0)
    with followed(env, "sh -c 'trap \"echo goodbye; exit\" TERM; echo hello; while :; do sleep 0.01; done'") as one:
        assert one.prints("hello")
        one.execution.kill("enough")
        assert one.outcome().stdout == b"hello\ngoodbye\n"


def test_a_silent_command_ends_after_the_output_timeout(env: Environment, clock: Clock) -> None:
    # Given a command that prints now on this stream, now on that, for longer than it may be silent, and then hangs
    command = "echo 1; until [ -e a ]; do sleep 0.01; done; echo 2 >&2; until [ -e b ]; do sleep 0.01; done; echo 3; sleep 300"
    with followed(env, command, timeout_s=10_000, output_timeout_s=1000.0) as one:
        for text, stream, go_on in (("1\n", "stdout", "a"), ("2\n", "stderr", "b")):
            assert one.prints(text, stream)
            clock.forward(800)
            env.write_file(go_on, b"")
        assert one.prints("3\n")
        clock.end(1000)
        assert (one.outcome().status, one.outcome().reason) == ("timed_out", "printed nothing for 1000 s")
        assert (one.outcome().stdout, one.outcome().stderr) == (b"1\n3\n", b"2\n")


def test_a_command_that_is_killed_before_its_turn_never_runs(env: Environment) -> None:
    # Given one that is killed before it is waited for, and one that waits for another of its session
    execution = admit(env, "touch wrong")
    execution.kill("too late")
    assert (execution.wait().status, execution.wait().reason) == ("cancelled", "too late")
    with followed(env, f"sleep 314.375{RUN}"), followed(env, "touch wrong") as second:
        sleepers(f"314.375{RUN}")
        second.execution.kill("not needed")
        assert second.outcome().status == "cancelled"
        assert processes_with(f"314.375{RUN}")
    assert printed(env, "ls") == ""


def test_a_kill_or_resize_after_the_end_changes_nothing(env: Environment) -> None:
    execution = admit(env, f"sleep 314.875{RUN} >/dev/null 2>&1 &")
    outcome = execution.wait()
    execution.kill("late")
    execution.resize(Holding((0,)))
    assert execution.wait() is outcome
    assert outcome.status == "succeeded"
    sleepers(f"314.875{RUN}")


def test_waiting_for_the_session_does_not_eat_the_timeout(env: Environment, clock: Clock) -> None:
    takes_long = followed(env, "touch begun; until [ -e go ]; do sleep 0.01; done", timeout_s=1000)
    with takes_long as first, followed(env, "echo ran", timeout_s=100) as second:
        assert until(lambda: exists(env, "begun"))
        clock.forward(500)
        env.write_file("go", b"")
        assert (first.outcome().status, second.outcome().stdout) == ("succeeded", b"ran\n")
