"""What a command in a container holds."""

from __future__ import annotations

import threading

import pytest

from tests.workers_cpu.support import admit, until
from workers.cpu.abstract import ExecOutcome, Holding
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
