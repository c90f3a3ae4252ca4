"""What a command in a container holds."""

from __future__ import annotations

import threading

import pytest

from tests.workers_cpu.support import RUN, admit, printed, processes_with, until
from workers.cpu.abstract import ExecOutcome, ExecRequest, Holding
from workers.cpu.docker.environment import ContainerEnvironment


@pytest.fixture
def env(shared: ContainerEnvironment) -> ContainerEnvironment:
    """Give the environment that the tests share."""
    return shared


def test_a_command_sees_the_cores_that_it_holds(env: ContainerEnvironment) -> None:
    # Given grants of different cores; when commands look; then they see them
    for cores, seen in (((0,), "0"), ((1,), "1"), ((0, 1), "0-1")):
        outcome = admit(env, "grep Cpus_allowed_list /proc/self/status", cores=cores).wait()
        assert outcome.stdout.decode().split()[-1] == seen


def test_a_command_grows_and_shrinks_while_it_runs(env: ContainerEnvironment) -> None:
    # Given a command of several processes on one core, which notes the cores that it sees
    look = "grep Cpus_allowed_list /proc/self/status | cut -f2"
    command = f"{look} >a; for step in b c; do until test -f go-$step; do sleep 0.01; done; {look} >$step; (cat $step); done"
    box: list[ExecOutcome] = []
    execution = admit(env, command, cores=(0,))
    thread = threading.Thread(target=lambda: box.append(execution.wait()))
    thread.start()
    assert until(lambda: has(env, "a", b"0\n"))
    # When it is given another, and then none but the other
    for step, cores in (("b", (0, 1)), ("c", (1,))):
        execution.resize(Holding(cores))
        env.write_file(f"go-{step}", b"")
        assert until(lambda step=step: has(env, step, b"\n"))  # type: ignore[misc]
    thread.join(60)
    # Then it has seen each
    assert box[0].stdout == b"0-1\n1\n"


def test_a_command_out_of_time_leaves_nothing_running(env: ContainerEnvironment) -> None:
    # Given a command of several processes; when it runs out of time
    outcome = admit(env, f"sleep 323.8765{RUN} & sh -c 'sleep 323.8765{RUN}; true' & wait", cores=(0,), timeout_s=0.3).wait()
    # Then it has ended with all of them, and the session takes more
    assert outcome.status == "timed_out"
    assert processes_with(f"323.8765{RUN}") == []
    assert printed(env, "echo alive") == "alive\n"


def test_what_leaves_the_tree_of_a_command_out_of_time_is_ended(env: ContainerEnvironment) -> None:
    # Given a command whose child is nobody's; when it runs out of time
    outcome = admit(env, f"(setsid sleep 323.8766{RUN} &); sleep 20", cores=(0,), timeout_s=0.3).wait()
    # Then that has ended, too
    assert outcome.status == "timed_out"
    assert processes_with(f"323.8766{RUN}") == []


def test_a_fence_ends_orphans(env: ContainerEnvironment) -> None:
    # Given an orphan of an earlier command; when a command comes with a fence
    printed(env, f"(setsid sleep 323.8767{RUN} &); true")
    outcome = env.start(ExecRequest(action_id="a", command="echo clear", fence=True, timeout_s=60)).wait()
    # Then it is gone
    assert outcome.stdout == b"clear\n", outcome
    assert processes_with(f"323.8767{RUN}") == []


def test_what_a_command_uses_is_measured(env: ContainerEnvironment) -> None:
    # Given a command that works in a child, and then asks what that has used; when it has run
    count = "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done"
    outcome = admit(env, f"({count}); cat /proc/$$/stat", cores=(1,)).wait()
    # Then that is what is reported
    fields = outcome.stdout.rpartition(b")")[2].split()
    assert outcome.cpu_s == pytest.approx((int(fields[13]) + int(fields[14])) / 100, abs=0.1), outcome
    assert outcome.cpu_s > 0.1, outcome


def has(environment: ContainerEnvironment, path: str, end: bytes) -> bool:
    """Say whether a file is there and ends so."""
    try:
        return environment.read_file(path).endswith(end)
    except FileNotFoundError:
        return False
