"""Commands in the background in containers: a container counts as one of them while none of its commands is in the foreground."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.workers_cpu.support import RUN, in_background, is_low, is_of_cpu, running, sleepers, until, weight_of
from workers.cpu import weight
from workers.cpu.abstract import Holding
from workers.cpu.docker.environment import ContainerEnvironment

pytestmark = pytest.mark.real

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
