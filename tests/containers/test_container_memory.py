"""A container whose memory is full ends as that, also where the worker looks so late that the engine has removed it."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.workers_cpu.support import admit, printed, until
from workers.cpu.abstract import EnvironmentSpec
from workers.cpu.docker.engine import DockerEngine
from workers.cpu.docker.options import ContainerOptions
from workers.cpu.docker.sandbox import ContainerSandbox

from .conftest import NODE
from .support import containers, groups_of, worker

TAKES_PROCESS_1 = "echo 1000 >/proc/1/oom_score_adj; for f in 1 2 3 4; do head -c 30000000 /dev/zero >/dev/shm/$f; done"
"""Has the kernel end process 1 of a container of 64 MB."""


class LateEngine(DockerEngine):
    """An engine that does `meanwhile` before it says with which code a program has ended."""

    meanwhile: Callable[[], object]

    def exit_code(self, started: str) -> int | None:
        self.meanwhile()
        return super().exit_code(started)


def test_a_shell_and_then_its_container_that_the_kernel_ends_for_memory_are_a_loss(tmp_path: Path, options: ContainerOptions) -> None:
    engine = LateEngine()
    box = ContainerSandbox(tmp_path / "box", node=f"{NODE}-late", options=options, engine=engine)
    try:
        env = box.open(EnvironmentSpec(id="e1"))
        printed(env, ":")

        def is_gone() -> bool:
            subprocess.run(["docker", "exec", env.container.id, "sh", "-c", TAKES_PROCESS_1], capture_output=True)
            return not containers(f"{NODE}-late") and not groups_of(env.container.id)

        engine.meanwhile = lambda: until(is_gone)
        # Given a command whose shell the kernel ends for want of memory
        fills = "(until test -e full; do :; done; tail /dev/zero & exec tail /dev/zero)"
        # When it ends process 1, too, and the engine removes the container, before the worker knows how the shell has ended
        outcome = admit(env, f"{fills} & echo 1000 >/proc/$$/oom_score_adj; : >full; wait", cores=(0,)).wait()
        # Then the command is lost for that
        assert (outcome.status, outcome.cause, outcome.exit_code) == ("lost", "out_of_memory", None), outcome
        assert "its memory was full" in outcome.reason
    finally:
        box.close()


@pytest.mark.parametrize("command", ["touch over; sleep 300", "tail /dev/zero; touch over; (exit 137)"], ids=["runs", "has ended"])
def test_a_worker_that_stood_still_says_that_the_kernel_has_ended_the_container(tmp_path: Path, image: str, command: str) -> None:
    # Given a worker that stands still while a command runs or fills the memory
    node = f"{NODE}-stopped"
    with worker(tmp_path, node, image, f"touch begun; until test -e go; do sleep 0.05; done; {command}") as (process, container_id):
        inside = ["docker", "exec", container_id, "sh", "-c"]
        assert until(lambda: subprocess.run([*inside, "test -e /work/begun"]).returncode == 0)
        process.send_signal(signal.SIGSTOP)
        subprocess.run([*inside, "touch /work/go; until test -e /work/over; do sleep 0.05; done"], check=True)
        # When the kernel ends process 1, and the engine removes the container, before the worker goes on

        def is_gone() -> bool:
            subprocess.run([*inside, TAKES_PROCESS_1], capture_output=True)
            return container_id not in containers(node) and not groups_of(container_id)

        assert until(is_gone)
        process.send_signal(signal.SIGCONT)
        # Then the command has ended for that
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said.startswith("out_of_memory: ") and "full" in said, said
