"""A container whose memory is full ends as that, also where the worker looks so late that the engine has removed it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.workers_cpu.support import admit, printed, until
from workers.cpu.abstract import EnvironmentSpec
from workers.cpu.docker.engine import DockerEngine
from workers.cpu.docker.environment import ContainerEnvironment
from workers.cpu.docker.meter import GroupMeter
from workers.cpu.docker.options import ContainerOptions

from .conftest import node_name
from .support import box_of, containers, docker, engine, groups_of, pauses, worker

pytestmark = pytest.mark.real

TAKES_PROCESS_1 = "echo 1000 >/proc/1/oom_score_adj; for f in 1 2 3 4; do head -c 30000000 /dev/zero >/dev/shm/$f; done"
"""Has the kernel end process 1 of a container of 64 MB."""
OVER_LATER = "(sleep 1; touch over) >/dev/null 2>&1 &"
"""Says so once the command has certainly ended."""
LOSS = "its container ended: its memory was full"


class LateEngine(DockerEngine):
    """An engine that does `meanwhile` before it says with which code a program has ended."""

    meanwhile: Callable[[], object]

    def exit_code(self, started: str) -> int | None:
        self.meanwhile()
        return super().exit_code(started)


def loses_process_1(node: str, container_id: str) -> bool:
    """Have the kernel end process 1 for memory; say whether the engine has removed the container."""
    subprocess.run(["docker", "exec", container_id, "sh", "-c", TAKES_PROCESS_1], capture_output=True)
    return until(lambda: container_id not in containers(node) and not groups_of(container_id), 5.0)


def test_a_shell_and_then_its_container_that_the_kernel_ends_for_memory_are_a_loss(tmp_path: Path, options: ContainerOptions) -> None:
    late = LateEngine()
    with box_of(tmp_path / "box", options, node_name("late"), late) as box:
        env = box.open(EnvironmentSpec(id="e1"))
        printed(env, ":")
        late.meanwhile = lambda: until(lambda: loses_process_1(node_name("late"), env.container.id))
        # Given a command whose shell the kernel ends, as that itself fills the memory
        # When it ends process 1, too, and the engine removes the container, before the worker knows how the shell has ended
        outcome = admit(env, "text=$(head -c 90000000 /dev/zero | tr '\\0' a)", cores=(0,)).wait()
        assert (outcome.status, outcome.cause, outcome.exit_code) == ("lost", "out_of_memory", None), outcome
        assert outcome.reason == LOSS


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("touch over; sleep 300", f"out_of_memory: {LOSS}"),
        (f"tail /dev/zero; {OVER_LATER} (exit 137)", f"out_of_memory: {LOSS}"),
        (f"{OVER_LATER} (exit 3)", "exit: "),
    ],
    ids=["runs", "was killed", "has failed"],
)
def test_a_worker_that_stood_still_says_whether_the_kernel_has_ended_a_command_with_its_container(
    tmp_path: Path, image: str, command: str, said: str
) -> None:
    # Given a worker that stands still while a command runs or fills the memory
    node = node_name("stopped")
    waits = "touch begun; until test -e go; do sleep 0.05; done"
    with worker(tmp_path / "box", node, image, ":", f"{waits}; {command}") as stopped:
        ((container_id,), pid) = containers(node), stopped.process.pid or 0
        begun = Path(f"/proc/{engine().inspect_container(container_id)['State']['Pid']}/root/home/user/begun")
        assert until(begun.exists)
        os.kill(pid, signal.SIGSTOP)
        docker("exec", container_id, "sh", "-c", "touch /home/user/go; until test -e /home/user/over; do sleep 0.05; done")
        # When the kernel ends process 1, and the engine removes the container, before the worker goes on
        assert until(lambda: loses_process_1(node, container_id))
        os.kill(pid, signal.SIGCONT)
        # Then a command that ran, or was killed, has ended for that, and any other one as it did
        assert stopped.end() == said


def test_the_kill_of_process_1_is_no_commands(env: ContainerEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a command that has ended, and a container whose process 1 the kernel has ended for memory, but which has not noticed yet
    printed(env, ":")
    container, session = env.container, env.container.group.session("meter")
    meter = GroupMeter(container, session)
    assert until(lambda: pauses(container.id))
    try:
        os.kill(container.pid, signal.SIGKILL)
        monkeypatch.setattr(container.group, "oom_kills", lambda: 1)
        # When the command is remarked on; then that kill is left to the loss of the container
        assert until(container.is_ending)
        assert (meter.remark(), container.oom_kills_reported) == ("", 0)
        assert (container.loss(), container.loss_cause) == (LOSS, "out_of_memory")
    finally:
        subprocess.run(["docker", "unpause", container.id], capture_output=True)
