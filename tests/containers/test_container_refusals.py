"""A worker that could not keep what its settings promise does not start, and says so in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tangram.errors import InvalidAction
from workers.cpu.docker.options import ContainerOptions

from .conftest import needed

ROOT = Path(__file__).parents[2]
START = """
import sys
from app.services_file import ConfigError
from tangram.errors import TangramError
from tangram.settings import Settings
from workers.cpu.cores import CoreMap
from workers.start import _container_sandbox
from pathlib import Path
try:
    _container_sandbox(Path(sys.argv[1]), CoreMap.of_this_process(), "tangram-test-refused", Settings(), "fixed").close()
except TangramError as error:
    print(f"{type(error).__name__}: {error}")
"""


def said(base: Path, before: Sequence[str] = (), become: str = "") -> str:
    """Start a container sandbox as a worker does, in a process of its own, and return what it says."""
    env = {**os.environ, "TANGRAM_SANDBOX": "docker"}
    argv = [*before, sys.executable, "-c", START.replace("try:", f"{become}\ntry:"), str(base)]
    done = subprocess.run(argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    return done.stdout


@pytest.fixture
def says(tmp_path: Path, image: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Give what does the same in this process, for a worker with these variables and the rights of this process."""

    def start(**variables: str) -> str:
        for name, value in {"TANGRAM_SANDBOX": "docker", **variables}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["", str(tmp_path)])
        exec(compile(START, "start", "exec"), {})
        return capsys.readouterr().out

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
def test_a_worker_that_cannot_write_control_groups_does_not_start(tmp_path: Path, image: str, before: str, reason: str) -> None:
    needed("" if os.geteuid() == 0 else "changing mounts needs root")
    needed("" if Path("/sys/fs/cgroup/cpu").exists() or "mount --bind" not in before else "control groups are of version 2")
    refused = said(tmp_path, ["unshare", "--mount", "sh", "-c", f'{before}; exec "$@"', "sh"])
    assert refused.startswith("EngineUnavailable: ")
    assert reason in refused
    assert "must be root and have the host's control groups, writable, at /sys/fs/cgroup" in refused
    assert refused.count("\n") == 1


def test_a_worker_that_is_not_root_does_not_start(tmp_path: Path, image: str) -> None:
    needed("" if os.geteuid() == 0 else "becoming another user needs root")
    become = "import os, workers.cpu.docker.sandbox; os.setgid(os.stat('/var/run/docker.sock').st_gid); os.setuid(65534);"
    refused = said(tmp_path, become=become)
    assert refused.startswith("EngineUnavailable: control groups cannot be written by user 65534: a worker with containers must be root")
    assert refused.count("\n") == 1


def test_an_allow_list_is_refused_and_the_alternative_named(says: Callable[..., str]) -> None:
    refused = says(TANGRAM_CONTAINER_ALLOW="10.0.0.5:443")
    assert refused == (
        "ConfigError: TANGRAM_CONTAINER_ALLOW is not supported: "
        "let TANGRAM_CONTAINER_NETWORK name a Docker network with an egress proxy (docs/containers.md)\n"
    )


def test_a_network_that_the_engine_does_not_have_is_refused(says: Callable[..., str]) -> None:
    refused = says(TANGRAM_CONTAINER_NETWORK="no-such-network")
    assert refused == (
        "EngineUnavailable: the Docker engine has no network 'no-such-network': make it with `docker network create no-such-network`\n"
    )


@pytest.mark.parametrize("network", ["host", "container:redis", ""])
def test_a_network_that_is_not_the_containers_own_is_refused(network: str) -> None:
    with pytest.raises(InvalidAction, match="^network: must be the name of a Docker network, or none, not "):
        ContainerOptions(network=network)
