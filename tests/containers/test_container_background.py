"""A container counts for the cores of its commands. What is written at which change is in `test_cgroup_v2.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.workers_cpu.support import HERE, RUN, in_background, is_of_cpu, running, sleepers, weight_of
from workers.cpu import weight
from workers.cpu.abstract import Holding
from workers.cpu.docker.environment import ContainerEnvironment

pytestmark = pytest.mark.real

FIRST, BACK = Holding((HERE[0],)), Holding(background=True)


def container_folder(env: ContainerEnvironment) -> str:
    """Return the container's own group."""
    lines = [line.split(":", 2) for line in Path(f"/proc/{env.container.pid}/cgroup").read_text().splitlines()]
    path = next(f"cpu{path}" if name else path.removesuffix("/init") for _, name, path in lines if is_of_cpu(name))
    return f"/sys/fs/cgroup/{path.lstrip('/')}"


def counts_for(folder: str) -> float:
    """Return for how many cores a control group counts."""
    return next(int(file.read_text()) / each.core for each in weight.WEIGHTS if (file := Path(folder, each.name)).exists())


def test_a_container_counts_for_the_cores_of_its_commands(env: ContainerEnvironment) -> None:
    # Given two commands of one environment, on two cores and on one; then each counts for its cores, the container for all
    both = Holding(tuple(HERE[:2]))
    with running(env, f"sleep 305.0625{RUN}", both) as (execution, _), running(env, f"sleep 305.1875{RUN}", FIRST, "other"):
        (wide,), (narrow,) = sleepers(f"305.0625{RUN}"), sleepers(f"305.1875{RUN}")
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
