"""What goes wrong beside a command: an engine that does not answer, a close in the middle, a shell that never starts."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.sandboxes.test_output import exists
from tests.workers_cpu.support import admit, followed, printed, until
from workers.cpu import control_files
from workers.cpu.abstract import EnvironmentSpec, ExecRequest, Holding
from workers.cpu.docker import disk
from workers.cpu.docker.cgroups import v1, v2
from workers.cpu.docker.environment import ContainerEnvironment
from workers.cpu.docker.sandbox import ContainerSandbox
from workers.cpu.errors import EnvironmentGone

from .conftest import node_name
from .images import make_with_volume
from .support import containers


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Give what has the kernel's quotas of cores refuse to be written as long as it is set."""
    given = threading.Event()

    def failing(path: str, value: str) -> None:
        if given.is_set() and path.endswith(("cpu.cfs_quota_us", "cpu.max")):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        control_files.write(path, value)

    for module in (v1, v2):
        monkeypatch.setattr(module, "write", failing)
    yield given
    given.clear()


def test_what_a_command_did_stands_when_its_grant_cannot_be_taken_back(stuck: threading.Event, env: ContainerEnvironment) -> None:
    with followed(env, "touch mark; until [ -e go ]; do sleep 0.01; done; echo done", holding=Holding((0,))) as one:
        assert until(lambda: exists(env, "mark"))
        stuck.set()
        env.write_file("go", b"")
        assert (one.outcome().status, one.outcome().stdout) == ("succeeded", b"done\n")


def test_files_that_are_only_mapped_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(4 << 20))
    with path.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 4096)
    path.unlink()
    assert disk.nameless_bytes([str(tmp_path)], [os.getpid()]) >= 4 << 20
    mapped.close()
    assert disk.nameless_bytes([str(tmp_path)], [os.getpid()]) < 4 << 20


def test_what_is_written_to_a_volume_of_the_image_counts(sandbox: ContainerSandbox) -> None:
    env = sandbox.open(EnvironmentSpec(id="e1", image=make_with_volume()))
    writing = "i=0; while :; do dd if=/dev/zero of=/data/$i bs=1M count=1 2>/dev/null; i=$((i+1)); sleep 0.01; done"
    outcome = admit(env, writing, cores=(0,)).wait()
    assert outcome.status == "failed"
    assert "to disk" in outcome.reason


def test_a_living_container_is_not_lost_by_an_event_of_another(sandbox: ContainerSandbox, env: ContainerEnvironment) -> None:
    # Given an event that bears the number of a descriptor which has become this container's since
    sandbox._monitor._note_end(env.container.ended)
    assert printed(env, "echo here") == "here\n"
    assert sandbox.environments() == (env,)


def test_closing_an_environment_that_is_being_opened_ends_the_open(sandbox: ContainerSandbox) -> None:
    with ThreadPoolExecutor() as threads:
        opened = threads.submit(sandbox.open, EnvironmentSpec(id="e2"))
        assert until(lambda: "e2" in sandbox._environments)
        sandbox.close_environment("e2")
        assert isinstance(opened.exception(60), EnvironmentGone | None)
    with pytest.raises(EnvironmentGone):
        sandbox.get("e2")
    assert until(lambda: containers(node_name()) == [])


def test_a_fence_leaves_room_for_processes(env: ContainerEnvironment) -> None:
    admit(env, "n=0; while [ $n -lt 80 ]; do sleep 300 & n=$((n+1)); done; :", cores=(0,), timeout_s=5).wait()
    outcome = env.start(ExecRequest(action_id="a1", command="/bin/ls / | /bin/wc -l", fence=True, timeout_s=60)).wait()
    assert (outcome.status, outcome.exit_code, outcome.stderr) == ("succeeded", 0, b"")
