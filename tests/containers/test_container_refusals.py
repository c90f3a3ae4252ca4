"""A worker that could not keep what its settings promise does not start, and says so in one line."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable
from multiprocessing import Pipe, get_context
from pathlib import Path

import pytest

from tangram.errors import InvalidAction, TangramError
from tangram.settings import Settings
from tests.needed import needed
from workers.cpu.cores import CoreMap
from workers.cpu.docker.options import ContainerOptions
from workers.start import _container_sandbox

NEW_MOUNTS = 0x20000


@pytest.fixture
def says(tmp_path: Path, image: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Give what starts a container sandbox as a worker with these variables does, and returns what that says."""

    def start(**variables: str) -> str:
        for name, value in {"TANGRAM_SANDBOX": "docker", **variables}.items():
            monkeypatch.setenv(name, value)
        try:
            _container_sandbox(tmp_path, CoreMap.of_this_process(), "tangram-test-refused", Settings(), "fixed").close()
        except TangramError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    return start


@pytest.fixture
def says_elsewhere(says: Callable[..., str]) -> Callable[[Callable[[], object]], str]:
    """Give what does the same in a fork of this process, which has become something else first; that needs root."""
    needed("" if os.geteuid() == 0 else "changing mounts and users needs root")

    def start(become: Callable[[], object]) -> str:
        hears, tells = Pipe(duplex=False)
        process = get_context("fork").Process(target=lambda: (become(), tells.send(says())))
        process.start()
        tells.close()
        try:
            return str(hears.recv())
        finally:
            process.join(60)

    return start


def test_a_worker_that_may_use_the_engine_and_write_control_groups_starts(says: Callable[..., str]) -> None:
    assert says() == ""


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        ('for each in /sys/fs/cgroup /sys/fs/cgroup/cpu*; do mount -o remount,bind,ro "$each"; done', "cannot be written: /sys/fs/cgroup"),
        ("mount --bind /sys/fs/cgroup/cpu/docker /sys/fs/cgroup/cpu", "is not the worker's own control group"),
        ("umount --recursive --lazy /sys/fs/cgroup", "no control groups are mounted here"),
    ],
    ids=["read-only", "another view", "not mounted"],
)
def test_a_worker_that_cannot_write_control_groups_does_not_start(says_elsewhere: Callable[..., str], before: str, reason: str) -> None:
    needed("" if Path("/sys/fs/cgroup/cpu").exists() or "mount --bind" not in before else "control groups are of version 2")

    def change_mounts() -> None:
        assert ctypes.CDLL(None).unshare(NEW_MOUNTS) == 0
        subprocess.run(["sh", "-ec", f"mount --make-rprivate /; {before}"], check=True)

    refused = says_elsewhere(change_mounts)
    assert refused.startswith("EngineUnavailable: ")
    assert reason in refused
    assert "must be root and have the host's control groups, writable, at /sys/fs/cgroup" in refused
    assert "\n" not in refused


def test_a_worker_that_is_not_root_does_not_start(says_elsewhere: Callable[..., str]) -> None:
    refused = says_elsewhere(lambda: (os.setgid(os.stat("/var/run/docker.sock").st_gid), os.setuid(65534)))
    assert refused.startswith("EngineUnavailable: control groups cannot be written by user 65534: a worker with containers must be root")
    assert "\n" not in refused


def test_an_allow_list_is_refused_and_the_alternative_named(says: Callable[..., str]) -> None:
    refused = says(TANGRAM_CONTAINER_ALLOW="10.0.0.5:443")
    assert refused == (
        "ConfigError: TANGRAM_CONTAINER_ALLOW is not supported: "
        "let TANGRAM_CONTAINER_NETWORK name a Docker network with an egress proxy (docs/containers.md)"
    )


def test_a_network_that_the_engine_does_not_have_is_refused(says: Callable[..., str]) -> None:
    refused = says(TANGRAM_CONTAINER_NETWORK="no-such-network")
    assert refused == (
        "EngineUnavailable: the Docker engine has no network 'no-such-network': make it with `docker network create no-such-network`"
    )


@pytest.mark.parametrize("network", ["host", "container:redis", ""])
def test_a_network_that_is_not_the_containers_own_is_refused(network: str) -> None:
    with pytest.raises(InvalidAction, match="^network: must be the name of a Docker network, or none, not "):
        ContainerOptions(network=network)
