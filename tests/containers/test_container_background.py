"""A container counts for the cores of its commands. What is written at which change is in `test_cgroup_v2.py`."""

from __future__ import annotations

import pytest

from tests.sandboxes.support import counts_for, weight_of
from tests.workers_cpu.support import HERE, RUN, cpu_groups, in_background, running, sleepers
from workers.cpu.abstract import Holding
from workers.cpu.docker.environment import ContainerEnvironment

pytestmark = pytest.mark.real

FIRST, BACK = Holding((HERE[0],)), Holding(background=True)


def weight_of_container(env: ContainerEnvironment) -> int:
    """Return for how many cores the container's own group counts. With version 2 its process 1 is in a leaf below it."""
    return counts_for(group.parent if group.name == "init" else group for group in cpu_groups(env.container.pid))


def test_a_container_counts_for_the_cores_of_its_commands(env: ContainerEnvironment) -> None:
    # Given two commands of one environment, on two cores and on one; then each counts for its cores, the container for all
    both = Holding(tuple(HERE[:2]))
    with running(env, f"sleep 305.0625{RUN}", both) as (execution, _), running(env, f"sleep 305.1875{RUN}", FIRST, "other"):
        (wide,), (narrow,) = sleepers(f"305.0625{RUN}"), sleepers(f"305.1875{RUN}")
        assert (weight_of(wide), weight_of(narrow), weight_of_container(env)) == (2, 1, 3)
        execution.resize(FIRST)
        assert (weight_of(wide), weight_of_container(env)) == (1, 2)
        execution.resize(BACK)
        assert (in_background(wide, "cgroup"), weight_of_container(env)) == (True, 1)
        execution.resize(both)
        assert (weight_of(wide), weight_of_container(env)) == (2, 3)
