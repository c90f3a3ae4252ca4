"""Fixtures: a container sandbox on this machine's Docker engine, and one environment in it.

Without an engine the tests are skipped; with CI set, a missing engine is a failure.
"""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.needed import needed
from workers.cpu.abstract import EnvironmentSpec
from workers.cpu.docker.environment import ContainerEnvironment
from workers.cpu.docker.options import ContainerLimits, ContainerOptions
from workers.cpu.docker.sandbox import ContainerSandbox

from .images import BUSYBOX, busybox, make_busybox

if TYPE_CHECKING:
    from .registry import Registry

_RUN = secrets.token_hex(4)


def node_name(word: str = "main") -> str:
    """Return the name of a node for this process alone: the containers of a node go when another worker of that name starts."""
    return f"tangram-test-{_RUN}-{os.getpid()}-{word}"


def need_containers() -> None:
    """Skip the test, or fail it with CI set, where containers cannot be had."""
    needed("" if busybox() is not None else "there is no statically linked busybox (Debian: busybox-static)")
    try:
        subprocess.run(["docker", "info"], check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        needed("no Docker engine answers")


@pytest.fixture(scope="session")
def image(real_component: None) -> str:
    """Give the name of an image with busybox and nothing else."""
    need_containers()
    make_busybox()
    return BUSYBOX


@pytest.fixture(scope="session")
def hangs(image: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Give the name of an image whose shell never comes to anything."""
    script = tmp_path_factory.mktemp("hangs") / "sh"
    script.write_text("#!/bin/busybox sh\nexec sleep 3600\n")
    script.chmod(0o755)
    make_busybox(name := "tangram-test-hangs:1", programs={"bin/sh": script})
    return name


@pytest.fixture
def registry(image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    """Give a registry. Docker's configuration is an empty one."""
    from .registry import Registry, served

    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    with served(Registry()) as made:
        yield made


@pytest.fixture(scope="session")
def options(image: str) -> ContainerOptions:
    limits = ContainerLimits(memory_mb=64, processes=64, disk_mb=32, disk_check_s=0.1)
    return ContainerOptions(image=image, pull="never", limits=limits)


@pytest.fixture
def sandbox(options: ContainerOptions, tmp_path: Path) -> Iterator[ContainerSandbox]:
    box = ContainerSandbox(tmp_path / "box", node=node_name(), options=options)
    yield box
    box.close()


@pytest.fixture
def env(sandbox: ContainerSandbox) -> ContainerEnvironment:
    return sandbox.open(EnvironmentSpec(id="e1"))
