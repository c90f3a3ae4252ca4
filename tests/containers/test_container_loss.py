"""What trainers see of a container that dies: the same, whatever they did in it, and whoever killed it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from app.local.stack import StackPlan
from tangram import EnvironmentLost
from tests.live.support import FAST_BEATS, Live, running
from tests.workers_cpu.support import until

from .images import BUSYBOX
from .support import containers

NODE = "cpu-0"


@pytest.fixture(scope="module")
def stack(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Run a stack whose environments are containers of 64 MB."""
    variables = {**FAST_BEATS, "TANGRAM_SANDBOX": "docker", "TANGRAM_IMAGE": BUSYBOX, "TANGRAM_IMAGE_PULL": "never"}
    plan = StackPlan(nodes=1, cores=2, memory_mb=512, variables=variables)
    with running(tmp_path_factory.mktemp("loss"), plan) as started:
        yield started


@pytest.mark.parametrize("killer", ["somebody", "the kernel"])
def test_every_action_of_a_container_that_dies_says_that_the_environment_is_lost(stack: Live, killer: str) -> None:
    with stack.client() as client:
        before = set(containers(NODE))
        env = client.open(trajectory="t", memory_mb=64)
        env.exec("touch here")
        # Given a command that runs, one that waits for it, and one that the scheduler has not handed out
        running_one = env.submit("touch begun; until test -f go; do sleep 0.05; done; tail /dev/zero & tail /dev/zero & wait; sleep 20")
        behind = env.submit("true")
        beside = env.submit("sleep 20", session="beside")
        assert until(lambda: "begun" in env.exec("ls", session="look").stdout)
        # When the container dies
        if killer == "somebody":
            (killed,) = set(containers(NODE)) - before
            subprocess.run(["docker", "kill", killed], check=True, capture_output=True)
        else:
            env.exec("echo 1000 >/proc/1/oom_score_adj; touch go", session="look")
        # Then each says so, and names the node
        for handle in (running_one, behind, beside):
            with pytest.raises(EnvironmentLost, match=f"environment {env.id} is lost: ") as lost:
                handle.result(20)
            assert lost.value.node == NODE
        # And so does whatever comes later
        for use in (lambda: env.exec("true"), lambda: env.read_file("here"), lambda: env.write_file("here", b"")):
            with pytest.raises(EnvironmentLost) as lost:
                use()
            assert lost.value.node == NODE


def test_a_command_that_the_kernel_ends_for_its_memory_is_no_loss(stack: Live) -> None:
    with stack.client() as client, client.open(trajectory="t", memory_mb=64) as env:
        # When a command fills the memory; then it has ended by itself, and the environment takes more
        assert env.exec("tail /dev/zero").exit_code == 137
        assert env.exec("echo here").stdout == "here\n"
