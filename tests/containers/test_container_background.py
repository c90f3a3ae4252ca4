"""Commands in the background in containers: a container counts as one of them while none of its commands is in the foreground."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.workers_cpu.support import RUN, in_background, is_low, is_of_cpu, printed, processes_with, running, sleepers, until, weight_of
from workers.cpu import weight
from workers.cpu.abstract import ExecRequest, Holding
from workers.cpu.docker.environment import ContainerEnvironment

HERE = sorted(os.sched_getaffinity(0))
FIRST, BACK = Holding((HERE[0],)), Holding(background=True)


@pytest.fixture
def env(shared: ContainerEnvironment) -> ContainerEnvironment:
    """Give the environment that the tests share."""
    return shared


def sleeper(number: str) -> int:
    """Return the process `sleep number`, once there is one."""
    return sleepers(number)[0]


def container_folder(env: ContainerEnvironment) -> str:
    """Return the container's own group."""
    lines = [line.split(":", 2) for line in Path(f"/proc/{env.container.pid}/cgroup").read_text().splitlines()]
    path = next(f"cpu{path}" if name else path.removesuffix("/init") for _, name, path in lines if is_of_cpu(name))
    return f"/sys/fs/cgroup/{path.lstrip('/')}"


def container_is_in_background(env: ContainerEnvironment) -> bool:
    """Say whether the container's own group is in the background."""
    return is_low(container_folder(env))


def counts_for(folder: str) -> float:
    """Return for how many cores a control group counts."""
    return next(int(file.read_text()) / each.core for each in weight.WEIGHTS if (file := Path(folder, each.name)).exists())


def quota_of(pid: int) -> int:
    """Return the core-microseconds of each period that a process may use, below 0 for all."""
    lines = [line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
    folders = [f"/sys/fs/cgroup/{name}{path}" for _, name, path in lines if is_of_cpu(name)]
    (said,) = [
        file.read_text().split()[0]
        for folder in folders
        for name in ("cpu.cfs_quota_us", "cpu.max")
        if (file := Path(folder, name)).exists()
    ]
    return -1 if said == "max" else int(said)


def test_a_command_goes_to_the_background_and_comes_back(env: ContainerEnvironment) -> None:
    # Given a command on the first core, with a child out of its session
    with running(env, f"setsid sleep 305.5{RUN} & wait; sleep 600", FIRST) as (execution, _):
        pid = sleeper(f"305.5{RUN}")
        for _ in range(2):
            # When it goes to the background; then it and its container are there, on all cores
            execution.resize(BACK)
            assert in_background(pid, "cgroup")
            assert container_is_in_background(env)
            assert os.sched_getaffinity(pid) == set(HERE)
            # When it comes back; then neither is
            execution.resize(FIRST)
            assert not in_background(pid, "cgroup")
            assert not container_is_in_background(env)
            assert os.sched_getaffinity(pid) == {HERE[0]}


def test_what_a_command_left_has_the_cores_of_a_command_of_another_session(env: ContainerEnvironment) -> None:
    # Given what a command left running, parked
    env.start(ExecRequest(action_id="a", command=f"sleep 305.625{RUN} >/dev/null 2>&1 &", session="server")).wait()
    pid = sleeper(f"305.625{RUN}")
    assert quota_of(pid) > 0
    # When a command of another session runs; then it is held by nothing but its core, and the container weighs no more
    with running(env, f"sleep 305.6875{RUN}", FIRST, "test"):
        sleeper(f"305.6875{RUN}")
        assert quota_of(pid) < 0
        assert os.sched_getaffinity(pid) == {HERE[0]}
        assert counts_for(container_folder(env)) == 1
    # And once that is over it is parked again
    assert quota_of(pid) > 0


def test_a_container_counts_for_the_cores_of_its_commands(env: ContainerEnvironment) -> None:
    # Given two commands of one environment, on two cores and on one; then each counts for its cores, the container for all
    both = Holding(tuple(HERE[:2]))
    with running(env, f"sleep 305.0625{RUN}", both) as (execution, _), running(env, f"sleep 305.1875{RUN}", FIRST, "other"):
        wide, narrow = sleeper(f"305.0625{RUN}"), sleeper(f"305.1875{RUN}")
        assert (weight_of(wide), weight_of(narrow), counts_for(container_folder(env))) == (2, 1, 3)
        # When the first gets fewer cores; then it counts for fewer
        execution.resize(FIRST)
        assert (weight_of(wide), counts_for(container_folder(env))) == (1, 2)
        # When it goes to the background; then only the other counts
        execution.resize(BACK)
        assert (in_background(wide, "cgroup"), counts_for(container_folder(env))) == (True, 1)
        # When it comes back; then both do as before
        execution.resize(both)
        assert (weight_of(wide), counts_for(container_folder(env))) == (2, 3)


def test_a_container_is_in_the_foreground_while_one_of_its_commands_is(env: ContainerEnvironment) -> None:
    # Given two commands of one environment, one of them in the background
    with running(env, f"sleep 305.25{RUN}", FIRST) as (front, _), running(env, f"sleep 305.75{RUN}", BACK, "other") as (back, outcomes):
        waiting, other = sleeper(f"305.25{RUN}"), sleeper(f"305.75{RUN}")
        # Then the container is not, and that command stays on the other's core
        assert (in_background(waiting, "cgroup"), in_background(other, "cgroup")) == (False, True)
        assert not container_is_in_background(env)
        assert os.sched_getaffinity(other) == {HERE[0]}
        # When both are; then the container is
        front.resize(BACK)
        assert (in_background(waiting, "cgroup"), container_is_in_background(env)) == (True, True)
        assert os.sched_getaffinity(other) == set(HERE)
        # When one comes back, and then ends; then the container is in the foreground, and again is not
        front.resize(FIRST)
        assert not container_is_in_background(env)
        front.kill("enough")
        assert until(lambda: container_is_in_background(env))
        # When the last one ends and another command begins; then nothing is
        back.kill("enough")
        assert until(lambda: bool(outcomes))
    with running(env, f"sleep 305.125{RUN}", FIRST):
        pid = sleeper(f"305.125{RUN}")
        assert (in_background(pid, "cgroup"), container_is_in_background(env)) == (False, False)


def test_what_a_command_in_the_background_leaves_behind_does_not_slow_the_next(env: ContainerEnvironment) -> None:
    # Given what a command in the background has left; when another begins; then it is not in the background
    env.start(ExecRequest(action_id="a", command=f"sleep 305.875{RUN} >/dev/null 2>&1 &", holding=BACK)).wait()
    pid = sleeper(f"305.875{RUN}")
    with running(env, f"sleep 305.625{RUN}", FIRST):
        assert not in_background(sleeper(f"305.625{RUN}"), "cgroup")
        assert not in_background(pid, "cgroup")


def test_a_command_alone_is_sent_with_its_container(env: ContainerEnvironment) -> None:
    # Given a command that starts in the background; then its container is there, and it gets its DoP
    with running(env, f"echo $TANGRAM_DOP >dop; sleep 305.375{RUN}", BACK, dop=2) as (execution, _):
        sleeper(f"305.375{RUN}")
        assert container_is_in_background(env)
        assert env.read_file("dop") == b"2\n"
        # When it gets a core; then its container is not
        execution.resize(FIRST)
        assert not container_is_in_background(env)


def test_a_kill_reaches_a_command_in_the_background(env: ContainerEnvironment) -> None:
    # Given a command in the background; when it is killed; then that is its end
    with running(env, f"sleep 305.3125{RUN} & wait", BACK) as (execution, outcomes):
        sleeper(f"305.3125{RUN}")
        execution.kill("enough")
        assert until(lambda: bool(outcomes))
    assert (outcomes[0].status, outcomes[0].reason) == ("cancelled", "enough")
    assert not processes_with(f"sleep\x00305.3125{RUN}\x00")


def test_a_container_alone_counts_for_the_cores_of_its_command(env: ContainerEnvironment) -> None:
    # Given a command on two cores; then its container counts for as many
    with running(env, f"sleep 305.4375{RUN}", Holding(tuple(HERE[:2]))) as (execution, _):
        sleeper(f"305.4375{RUN}")
        assert counts_for(container_folder(env)) == 2
        # When it gets one; then for one
        execution.resize(FIRST)
        assert counts_for(container_folder(env)) == 1


def test_what_a_command_gets_in_the_background_is_counted_apart(env: ContainerEnvironment) -> None:
    # Given a busy command that was in the foreground for a while; when it is in the background
    with running(env, "while :; do :; done", FIRST) as (execution, _):
        assert until(lambda: (usage := execution.used()) is not None and usage.cpu_s > 0.1)
        usage = execution.used()
        assert usage is not None
        assert usage.background_cpu_s == 0.0
        execution.resize(BACK)
        before = execution.used()
        assert before is not None
        # Then what it gets from then on counts
        assert until(lambda: (usage := execution.used()) is not None and usage.background_cpu_s > 0.01, 200.0)
        usage = execution.used()
        assert usage is not None
        assert usage.background_cpu_s - before.background_cpu_s == pytest.approx(usage.cpu_s - before.cpu_s, abs=1e-6)


def test_a_command_that_sleeps_in_the_background_is_out_of_time_as_elsewhere(env: ContainerEnvironment) -> None:
    # Given a command in the background that hangs; when its time is over; then that is its end
    with running(env, "sleep 300; true", BACK, timeout_s=1.0) as (_, outcomes):
        assert until(lambda: bool(outcomes))
    assert (outcomes[0].status, outcomes[0].reason) == ("timed_out", "ran longer than 1 s")


def test_time_without_a_core_does_not_count(env: ContainerEnvironment) -> None:
    # Given a busy command in the background, beside a busy one on each core
    spin = "while [ ! -e go ]; do :; done"
    others = " & ".join([f"( touch busy-{number}; {spin} )" for number in range(len(HERE))])
    with running(env, f"{others} & wait", Holding(tuple(HERE)), session="others"):
        assert until(lambda: printed(env, "ls", session="look").count("busy-") == len(HERE))
        with running(env, spin, BACK, timeout_s=0.5) as (execution, outcomes):
            # When it has stood for much longer than it may run; then it was not out of time
            assert until(lambda: execution.used() is not None)
            began = time.monotonic()
            assert until(lambda: time.monotonic() > began + 2.0 or bool(outcomes))
            env.write_file("go", b"")
            assert until(lambda: bool(outcomes))
    assert (outcomes[0].status, outcomes[0].exit_code) == ("succeeded", 0)
    assert outcomes[0].waited_s > 0
