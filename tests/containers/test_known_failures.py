"""Failures of neighbouring systems that concern containers, each shown not to happen here; `docs/known-failures.md` lists them.

`TANGRAM_TEST_CONTAINERS` says how many containers are opened at once. The few of its default are enough to see what each of them has.
"""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.sandboxes.support import Clock
from tests.workers_cpu.support import admit, followed, printed, until
from workers.cpu import leftovers
from workers.cpu.abstract import EnvironmentSpec, Holding
from workers.cpu.docker.engine import DockerEngine
from workers.cpu.docker.environment import ContainerEnvironment
from workers.cpu.docker.options import ContainerOptions
from workers.cpu.docker.sandbox import ContainerSandbox
from workers.cpu.errors import ContainerFailed, DiskFull
from workers.cpu.shell import session

from .conftest import node_name
from .images import make_with_volume
from .support import box_of, containers, docker, engine, pauses

pytestmark = pytest.mark.real

MANY = int(os.environ.get("TANGRAM_TEST_CONTAINERS", "4"))


@pytest.fixture(scope="module")
def volume_image(image: str) -> str:
    """Give an image that asks for a volume, and so has the engine make one without a name for each of its containers."""
    return make_with_volume()


def inspected(node: str) -> list[dict[str, Any]]:
    return [engine().inspect_container(each) for each in containers(node)]


def volumes_of(node: str) -> set[str]:
    """Return the folders of the volumes that a node's containers have, on this machine."""
    return {mount["Source"] for each in inspected(node) for mount in each["Mounts"] if mount["Type"] == "volume"}


def test_anonymous_volumes_do_not_fill_the_disk(volume_image: str, options: ContainerOptions, tmp_path: Path) -> None:
    """Sources: trajectoryRL #203 (7,135 anonymous volumes filled the disk, then every score was 0), control-tower #964 (Docker has
    addresses for about 30 networks).
    """
    node = node_name("volumes")
    # Given many environments, each of which has written to its volume
    with box_of(tmp_path / "box", options, node) as box, ThreadPoolExecutor(4) as threads:

        def use(number: int) -> None:
            env = box.open(EnvironmentSpec(id=f"e{number}", image=volume_image))
            assert printed(env, "dd if=/dev/zero of=/data/file bs=1M count=2 2>/dev/null; ls /data") == "file\n"

        list(threads.map(use, range(MANY)))
        volumes = volumes_of(node)
        assert len(volumes) == MANY and all(os.path.exists(f"{volume}/file") for volume in volumes)
        assert {name for each in inspected(node) for name in each["NetworkSettings"]["Networks"]} == {"none"}
        # When half are closed one by one, and the rest with the worker
        list(threads.map(lambda number: box.close_environment(f"e{number}"), range(0, MANY, 2)))
        assert len(volumes_of(node)) == MANY // 2
    assert not [volume for volume in volumes if os.path.exists(volume)]
    assert not {Path(volume).parent.name for volume in volumes} & set(docker("volume", "ls", "-q").split())


def test_volumes_of_a_killed_worker_go_with_its_containers(volume_image: str, options: ContainerOptions, tmp_path: Path) -> None:
    node = node_name("volume-left")
    docker("run", "-d", "--label", f"tangram.node={node}", volume_image, "sleep", "300")
    (volume,) = volumes_of(node)
    with box_of(tmp_path / "box", options, node):
        assert containers(node) == [] and not os.path.exists(volume)


def test_no_environment_is_opened_below_the_floor_of_free_disk(options: ContainerOptions, tmp_path: Path) -> None:
    """Source: trajectoryRL #203."""
    with box_of(tmp_path / "box", replace(options, disk_floor_mb=1 << 40), node_name("floor")) as box:
        with pytest.raises(DiskFull, match="less than its TANGRAM_DISK_FLOOR_MB") as caught:
            box.open(EnvironmentSpec(id="e1"))
        assert "\n" not in str(caught.value)
        assert containers(node_name("floor")) == []


def test_a_container_that_the_engine_does_not_remove_is_tried_again(
    options: ContainerOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Source: google/tunix #2312 (an error in a clean-up skipped the rest of it)."""
    monkeypatch.setattr(leftovers.Leftovers.__init__, "__defaults__", (0.05,))
    node, refusals = node_name("remove"), iter([True, True, True])
    removing = DockerEngine.remove

    def remove(engine: DockerEngine, container: str) -> None:
        if next(refusals, False):
            raise ContainerFailed("the removal of a container: the engine says: it has too much to do")
        removing(engine, container)

    with box_of(tmp_path / "box", options, node) as box:
        for number in range(3):
            printed(box.open(EnvironmentSpec(id=f"e{number}")), "sleep 300 & true")
        monkeypatch.setattr(DockerEngine, "remove", remove)
        # When the removal of each fails at first, then all go, and their programs with them
        for number in range(3):
            box.close_environment(f"e{number}")
        assert box.environments() == ()
        assert until(lambda: containers(node) == [])
        assert list((tmp_path / "box" / "control").iterdir()) == []


def test_a_stopped_container_init_holds_nothing_up(sandbox: ContainerSandbox, env: ContainerEnvironment) -> None:
    """Source: ClawBench #298 (no deadline on the host's side, so one wedged container stalled a whole batch)."""
    printed(env, "export kept=yes")
    os.kill(env.container.pid, signal.SIGSTOP)
    outcome = admit(env, "echo begun; sleep 300", cores=(0,), timeout_s=2.0).wait()
    assert (outcome.status, outcome.stdout) == ("timed_out", b"begun\n")
    assert printed(env, "echo $kept") == "yes\n"
    env.close()
    assert until(lambda: containers(node_name()) == []) and sandbox.environments() == ()


def test_a_frozen_container_ends_its_command_in_bounded_time_and_no_other(
    sandbox: ContainerSandbox, env: ContainerEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.cpu.shell.run.time", clock := Clock())
    # What is frozen neither ends nor notices anything, however long that may take
    for limit in ("backend.KILL_LIMIT_S", "environment.NOTICE_LIMIT_S"):
        monkeypatch.setattr(f"workers.cpu.docker.{limit}", 1.0)
    # Given two environments, one of which the engine freezes
    other = sandbox.open(EnvironmentSpec(id="other"))
    with followed(env, "echo begun; sleep 300", holding=Holding((0,)), timeout_s=1000) as frozen:
        assert frozen.prints("begun\n")
        assert until(lambda: pauses(env.container.id))
        assert printed(other, "echo on") == "on\n"
        # And its own command ends once it has run out of time and a kill has had the time that it may take
        clock.forward(1000)
        ended = frozen.outcome()
    assert ended.status == "timed_out" and "processes that cannot be killed" in ended.reason
    # And what is left in it goes on to end, once it is closed
    monkeypatch.setattr("workers.cpu.docker.backend.KILL_LIMIT_S", 1000.0)
    monkeypatch.setattr("workers.cpu.shell.session.CLOSE_LIMIT_S", 1000.0)
    env.close()
    assert until(lambda: env.container.id not in containers(node_name()))


def test_a_container_whose_processes_do_not_end_is_removed_all_the_same(
    env: ContainerEnvironment, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    printed(env, "sleep 300 & true")
    with monkeypatch.context() as patched:
        patched.setattr(session, "_has_ended", lambda backend: False)
        env.close()
    assert "of 1 sessions could not be ended: they are left to the removal of the container" in caplog.text
    assert until(lambda: containers(node_name()) == [])
