"""Requests to servers in containers: on which network they are, and what becomes of one whose container ends."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.sandboxes.test_ports import ask
from tests.workers_cpu.support import printed, until
from workers.cpu.abstract import EnvironmentSpec
from workers.cpu.docker.environment import ContainerEnvironment
from workers.cpu.docker.options import ContainerOptions
from workers.cpu.docker.sandbox import ContainerSandbox
from workers.cpu.errors import EnvironmentGone

from .conftest import NODE
from .support import box_of, docker

HERE = sorted(os.sched_getaffinity(0))
LISTENS = 'until grep -qi ":$(printf %04x {port}) .* 0A " /proc/net/tcp*; do usleep 20000; done'


@pytest.fixture
def env(shared: ContainerEnvironment) -> ContainerEnvironment:
    """Give the environment that the tests share."""
    return shared


def serve(env: ContainerEnvironment, port: int = 8000, *, session: str = "main", word: str = "here") -> None:
    """Have a command of a session leave busybox' server running, which gives the file `word`."""
    printed(env, f"mkdir -p {word}; echo {word} > {word}/word")
    server = f"busybox httpd -f -p 127.0.0.1:{port} -h $PWD/{word} >/dev/null 2>&1 &"
    printed(env, f"{server} {LISTENS.format(port=port)}", session)


def test_a_container_on_a_named_network_is_reached_by_its_loopback(tmp_path: Path, options: ContainerOptions) -> None:
    name = f"{NODE}-ports"
    docker("network", "create", "--internal", name)
    try:
        with box_of(tmp_path / "box", replace(options, network=name)) as box:
            env = box.open(EnvironmentSpec(id="e1"))
            serve(env)
            assert ask(env, 8000, "/word").body == b"here\n"
    finally:
        docker("network", "rm", name)


def test_no_thread_of_the_worker_stays_in_a_container(env: ContainerEnvironment) -> None:
    serve(env)
    own = os.readlink("/proc/self/ns/net")
    assert ask(env, 8000, "/word").status == 200

    def networks() -> set[str]:
        found = set()
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(FileNotFoundError):  # one that ends just now
                found.add(os.readlink(f"/proc/self/task/{thread}/ns/net"))
        return found

    # The kernel may have a thread for a moment after it was joined.
    assert until(lambda: networks() == {own})


def test_a_request_to_a_container_that_ends_says_that_it_is_lost(module_sandbox: ContainerSandbox) -> None:
    env = module_sandbox.open(EnvironmentSpec(id="mortal"))
    serve(env)
    docker("kill", env.container.id)
    assert until(lambda: env.container.has_ended())
    with pytest.raises(EnvironmentGone, match="lost"):
        ask(env, 8000, "/word")
