"""Timeouts and kills end the whole process tree of a command, and nothing else."""

from __future__ import annotations

import threading
import time

import pytest

from workers.cpu.abstract import ExecRequest, Holding
from workers.cpu.process.environment import ProcessEnvironment

from .support import RUN, admit, printed, processes_with, run, until

DOUBLE_FORK = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(float(sys.argv[1]))
    os._exit(0)
os.wait()
"""
ESCAPES = [
    "sleep {marker}",
    "sleep {marker} | cat",
    "sleep {marker} & sleep {marker} & wait",
    "setsid sleep {marker} & sleep {marker}",
    "(setsid sh -c 'sleep {marker} & sleep {marker} &' &) ; sleep {marker}",
    "sh -c 'trap \"\" TERM INT HUP; sleep {marker}; sleep {marker}'",
    "trap '' TERM; while :; do sleep {marker}; done",
    "python3 -c '{double_fork}' {marker}; sleep {marker}",
    "sleep {marker} & kill -STOP $$",
    "exec sleep {marker}",
    "env -i setsid nohup sleep {marker} >/dev/null 2>&1 & exec sleep {marker}",
]


@pytest.mark.parametrize("command", ESCAPES)
def test_a_kill_ends_every_process_of_the_command(shell_env: ProcessEnvironment, command: str) -> None:
    # Given a running command whose processes try to get away
    marker = f"314.0625{RUN}"
    execution = admit(shell_env, "echo before; " + command.format(marker=marker, double_fork=DOUBLE_FORK))
    thread = threading.Thread(target=execution.wait)
    thread.start()
    assert until(lambda: bool(processes_with(marker)))
    # When it is killed
    execution.kill("enough")
    thread.join(60)
    # Then none of its processes lives, what was printed is there, and the session goes on
    outcome = execution.wait()
    assert (outcome.status, outcome.exit_code, outcome.stdout) == ("cancelled", None, b"before\n")
    assert not processes_with(marker)
    assert printed(shell_env, "echo alive") == "alive\n"


def test_a_timeout_ends_the_command_with_what_it_printed(shell_env: ProcessEnvironment) -> None:
    # Given a stopped shell, and a process out of its session
    command = f"echo before; setsid sleep 314.03125{RUN} & kill -STOP $$; echo after"
    # When it runs out of time
    outcome = admit(shell_env, command, timeout_s=2).wait()
    # Then it says so, and none of its processes lives
    assert (outcome.status, outcome.exit_code, outcome.stdout, outcome.cause) == ("timed_out", None, b"before\n", "timeout")
    assert outcome.reason == "ran longer than 2 s"
    assert outcome.execution_s >= 0.5
    assert not processes_with(f"314.03125{RUN}")
    assert printed(shell_env, "echo alive") == "alive\n"


@pytest.mark.parametrize(("held_s", "status"), [(2.5, "succeeded"), (60.0, "timed_out")])
def test_the_time_for_which_a_command_is_held_for_its_reader_counts_up_to_a_bound(
    shell_env: ProcessEnvironment, held_s: float, status: str
) -> None:
    # Given a reader that is behind from the first output on, for longer than the command may run
    began: list[float] = []
    execution = shell_env.start(
        ExecRequest(
            action_id="held",
            command="head -c 1000000 /dev/zero",
            timeout_s=2.0,
            on_output=lambda name, data: began.append(time.monotonic()),
            is_held=lambda: bool(began) and time.monotonic() < began[0] + held_s,
        )
    )
    # When the reader is behind for less than twice that time; then the command succeeds, else it runs out of time at twice its limit
    outcome = execution.wait()
    assert outcome.status == status, outcome
    if status == "succeeded":
        assert len(outcome.stdout) == 1_000_000 and outcome.execution_s > 2.5
    else:
        assert (outcome.reason, outcome.cause) == ("ran longer than 2 s", "timeout") and outcome.execution_s >= 4.0
    assert printed(shell_env, "echo alive") == "alive\n"


def test_the_rest_of_a_command_does_not_run_after_a_timeout(shell_env: ProcessEnvironment) -> None:
    # Given a command with something dangerous behind something slow
    outcome = admit(shell_env, "for i in 1 2 3; do sleep 30; touch wrong; done; touch wrong", timeout_s=0.1).wait()
    # When it has timed out; then the rest has not happened
    assert outcome.status == "timed_out"
    assert printed(shell_env, "ls") == ""


def test_a_shell_that_loops_by_itself_is_ended(shell_env: ProcessEnvironment) -> None:
    # Given a loop of builtins only; when it runs out of time
    outcome = admit(shell_env, "while :; do :; done", timeout_s=0.1).wait()
    # Then it is over, and the session goes on
    assert outcome.status == "timed_out"
    assert printed(shell_env, "echo alive") == "alive\n"


def test_a_program_has_a_moment_to_end_by_itself(env: ProcessEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a program that says goodbye on SIGTERM, and a moment that a busy machine does not use up
    monkeypatch.setattr("workers.cpu.shell.run.GRACE_S", 10.0)
    command = "sh -c 'trap \"echo goodbye; exit\" TERM; echo hello; while :; do sleep 0.01; done'"
    # When it runs out of time; then what it says is part of the output
    assert admit(env, command, timeout_s=6).wait().stdout == b"hello\ngoodbye\n"


def test_background_processes_of_earlier_commands_survive_a_timeout(shell_env: ProcessEnvironment) -> None:
    # Given a server of an earlier command, with a child of its own
    server = f"sh -c 'sleep 314.5{RUN} & wait'"
    printed(shell_env, f"{server} >/dev/null 2>&1 &")
    assert until(lambda: len(processes_with(f"314.5{RUN}")) == 2)
    before = processes_with(f"314.5{RUN}")
    # When a later command runs out of time
    assert admit(shell_env, f"sleep 314.75{RUN}", timeout_s=0.1).wait().status == "timed_out"
    # Then the server and its child live, and the command does not
    assert processes_with(f"314.5{RUN}") == before
    assert not processes_with(f"314.75{RUN}")


def test_the_state_from_before_a_timeout_comes_back(env: ProcessEnvironment) -> None:
    # Given a session with an export, in a folder
    printed(env, "mkdir sub; cd sub; export Y=2")
    # When a command runs out of time; then the next one finds both
    assert admit(env, "sleep 30", timeout_s=0.1).wait().status == "timed_out"
    assert printed(env, "basename $PWD; echo $Y") == "sub\n2\n"


def test_a_silent_command_ends_after_the_output_timeout(env: ProcessEnvironment) -> None:
    # Given a command that prints for a while and then hangs
    command = "for i in $(seq 12); do echo $i; sleep 0.4; done; sleep 30"
    # When it may be silent for 4 s
    outcome = admit(env, command, output_timeout_s=4.0).wait()
    # Then printing has kept it alive, and silence has ended it
    assert (outcome.status, outcome.stdout) == ("timed_out", b"".join(b"%d\n" % number for number in range(1, 13)))
    assert outcome.reason == "printed nothing for 4 s"


def test_output_of_either_stream_counts_as_a_sign_of_life(env: ProcessEnvironment) -> None:
    # Given a command that prints to standard error only, longer than it may be silent
    command = "for i in $(seq 12); do echo $i >&2; sleep 0.4; done"
    # When it runs; then it ends by itself
    assert admit(env, command, output_timeout_s=4.0).wait().status == "succeeded"


def test_a_kill_from_another_thread_cancels(env: ProcessEnvironment) -> None:
    # Given a running command
    execution = admit(env, f"echo before; touch started; sleep 314.625{RUN}")
    thread = threading.Thread(target=execution.wait)
    thread.start()
    assert until(lambda: bool(processes_with(f"314.625{RUN}")))
    # When it is killed, twice
    execution.kill("the trajectory was dropped")
    execution.kill("another reason")
    thread.join(60)
    # Then it is cancelled for the first reason, with its output, and gone
    outcome = execution.wait()
    assert (outcome.status, outcome.exit_code, outcome.stdout) == ("cancelled", None, b"before\n")
    assert outcome.reason == "the trajectory was dropped"
    assert not processes_with(f"314.625{RUN}")


def test_a_kill_before_the_wait_means_that_nothing_runs(env: ProcessEnvironment) -> None:
    # Given an admitted command that was killed at once
    execution = admit(env, "touch wrong")
    execution.kill("too late")
    # When it is waited for; then it is cancelled, and never ran
    assert (execution.wait().status, execution.wait().reason) == ("cancelled", "too late")
    assert printed(env, "ls") == ""


def test_a_kill_of_a_command_that_waits_for_its_session(env: ProcessEnvironment) -> None:
    # Given a command that has the session, and one behind it
    first, second = admit(env, f"sleep 314.375{RUN}"), admit(env, "touch wrong")
    threads = [threading.Thread(target=execution.wait) for execution in (first, second)]
    threads[0].start()
    assert until(lambda: bool(processes_with(f"314.375{RUN}")))
    threads[1].start()
    # When the second is killed; then it is over while the first runs on
    second.kill("not needed")
    threads[1].join(60)
    assert second.wait().status == "cancelled"
    assert processes_with(f"314.375{RUN}")
    first.kill("done")
    threads[0].join(60)
    assert first.wait().status == "cancelled"


def test_a_kill_or_resize_after_the_end_changes_nothing(env: ProcessEnvironment) -> None:
    # Given a command that is over, and a background process of it
    execution = admit(env, f"sleep 314.875{RUN} >/dev/null 2>&1 &")
    outcome = execution.wait()
    # When it is killed and resized
    execution.kill("late")
    execution.resize(Holding((0,)))
    # Then the outcome and the process stand
    assert execution.wait() is outcome
    assert outcome.status == "succeeded"
    assert until(lambda: bool(processes_with(f"314.875{RUN}")))


def test_waiting_for_the_session_does_not_eat_the_timeout(env: ProcessEnvironment) -> None:
    # Given a command with a timeout behind one that takes longer than it
    first, second = admit(env, f"sleep 2.75{RUN}"), admit(env, "echo ran", timeout_s=2.5)
    threads = [threading.Thread(target=execution.wait) for execution in (first, second)]
    threads[0].start()
    assert until(lambda: bool(processes_with(f"sleep\x002.75{RUN}")))
    threads[1].start()
    for thread in threads:
        thread.join(60)
    # When both are over; then the second has run
    assert second.wait().stdout == b"ran\n"


def test_a_fork_storm_is_ended(env: ProcessEnvironment) -> None:
    # Given a command that starts processes as fast as it can, each ending soon
    command = f"while :; do (setsid sleep 314.9375{RUN} &) ; sleep 0.005; done"
    # When it runs out of time; then none is left
    assert admit(env, command, timeout_s=0.2).wait().status == "timed_out"
    assert not processes_with(f"314.9375{RUN}")


def test_a_command_that_ends_its_shell_leaves_its_background_processes(env: ProcessEnvironment) -> None:
    # Given a command that starts a server and ends the shell
    outcome = run(env, f"sleep 314.4375{RUN} >/dev/null 2>&1 & exit 3")
    # When it is over; then the server lives, and goes with the environment
    assert outcome.exit_code == 3
    assert until(lambda: bool(processes_with(f"314.4375{RUN}")))
    env.close()
    assert not processes_with(f"314.4375{RUN}")
