"""Fixtures: a container sandbox on this machine's Docker engine, and one environment in it.

Without an engine the tests are skipped; with CI set, a missing engine is a failure.
"""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from workers.cpu.abstract import EnvironmentSpec, ExecRequest
from workers.cpu.docker.environment import ContainerEnvironment
from workers.cpu.docker.options import ContainerLimits, ContainerOptions
from workers.cpu.docker.sandbox import ContainerSandbox

from .images import BUSYBOX, busybox, make_busybox

_RUN = secrets.token_hex(4)


def node_name(word: str = "main") -> str:
    """Return the name of a node for this process alone: the containers of a node go when another worker of that name starts."""
    return f"tangram-test-{_RUN}-{os.getpid()}-{word}"


def needed(missing: str) -> None:
    """Skip the test for want of something, or fail it with CI set; nothing where `missing` says nothing."""
    if missing and os.environ.get("CI"):
        pytest.fail(missing)
    if missing:
        pytest.skip(missing)


def _missing() -> str:
    """Return what these tests lack here, nothing where they can run."""
    if busybox() is None:
        return "there is no statically linked busybox (Debian: busybox-static)"
    try:
        subprocess.run(["docker", "info"], check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return "no Docker engine answers"
    return ""


@pytest.fixture(scope="session")
def image(real_component: None) -> str:
    """Give the name of an image with busybox and nothing else."""
    needed(_missing())
    make_busybox()
    return BUSYBOX


@pytest.fixture(scope="session")
def hangs(image: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Give the name of an image whose shell never comes to anything."""
    return with_shell("hangs", "exec sleep 3600", tmp_path_factory)


@pytest.fixture(scope="session")
def stops(image: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Give the name of an image whose shells are stopped before they start, once there is a file /home/user/stop."""
    return with_shell("stops", '[ -e /home/user/stop ] && kill -STOP $$\nexec /bin/busybox sh "$@"', tmp_path_factory)


def with_shell(name: str, lines: str, folders: pytest.TempPathFactory) -> str:
    """Import an image whose shell is a script; return its name."""
    script = folders.mktemp(name) / "sh"
    script.write_text(f"#!/bin/busybox sh\n{lines}\n")
    script.chmod(0o755)
    make_busybox(image := f"tangram-test-{name}:1", programs={"bin/sh": script})
    return image


@pytest.fixture(scope="session")
def bounds(image: str) -> ContainerOptions:
    """Give options with bounds that tests can run into."""
    limits = ContainerLimits(memory_mb=64, processes=64, disk_mb=32, disk_check_s=0.1)
    return ContainerOptions(image=image, pull="never", limits=limits)


@pytest.fixture
def options(bounds: ContainerOptions) -> ContainerOptions:
    """Give the options of `sandbox`, which a file of tests may change."""
    return bounds


@pytest.fixture
def sandbox(options: ContainerOptions, tmp_path: Path) -> Iterator[ContainerSandbox]:
    """Give a sandbox."""
    box = ContainerSandbox(tmp_path / "box", node=node_name(), options=options)
    yield box
    box.close()


@pytest.fixture
def env(sandbox: ContainerSandbox) -> ContainerEnvironment:
    """Give an environment."""
    return sandbox.open(EnvironmentSpec(id="e1"))


@pytest.fixture(scope="module")
def module_sandbox(bounds: ContainerOptions, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ContainerSandbox]:
    """Give a sandbox that the tests of a module share. Its node is another one than `sandbox` has, so that its containers do not count."""
    box = ContainerSandbox(tmp_path_factory.mktemp("module") / "box", node=node_name("module"), options=bounds)
    yield box
    box.close()


def emptied(environment: ContainerEnvironment) -> ContainerEnvironment:
    """End what runs in an environment and remove the files of its folders; return it. Its sessions are kept."""
    command = "cd; rm -rf ./* ./.[!.]* /tmp/* /tmp/.[!.]* /dev/shm/*"
    done = environment.start(ExecRequest(action_id="empty", command=command, fence=True, timeout_s=60)).wait()
    assert (done.status, done.exit_code) == ("succeeded", 0), done
    return environment


@pytest.fixture
def shared(module_sandbox: ContainerSandbox) -> ContainerEnvironment:
    """Give the module's environment as a new one: without processes, variables and files of earlier tests. Sessions are kept.

    For tests of what commands do. Each container costs several times what they do.
    """
    return emptied(module_sandbox.open(EnvironmentSpec(id="shared")))
