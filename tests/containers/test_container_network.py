"""Containers on a named network: what they reach, such as an egress proxy, and that their servers are asked by their loopback."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.sandboxes.conftest import container_options
from tests.sandboxes.test_ports import ask, serve
from tests.workers_cpu.support import run, until
from workers.cpu.abstract import EnvironmentSpec
from workers.cpu.docker.environment import ContainerEnvironment
from workers.cpu.docker.options import ContainerOptions
from workers.cpu.errors import EnvironmentGone

from .conftest import node_name
from .support import box_of, docker

pytestmark = pytest.mark.real

INSIDE, OUTSIDE = node_name("inside"), node_name("outside")
GREETING = "hello"


@pytest.fixture(scope="module")
def server(image: str) -> Iterator[str]:
    """Give the address of a server outside an internal network, on which `egress` is a proxy that leads there."""
    made: list[str] = []

    def start(network: str, script: str) -> str:
        made.append(docker("run", "-d", "--rm", "--network", network, image, "sh", "-c", f"while :; do {script}; done"))
        return docker("inspect", "-f", "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}", made[-1])

    docker("network", "create", OUTSIDE)
    docker("network", "create", "--internal", INSIDE)
    try:
        address = start(OUTSIDE, f"echo {GREETING} | nc -l -p 9000")
        start(OUTSIDE, f"nc -l -p 3128 -e nc {address} 9000")
        docker("network", "connect", "--alias", "egress", INSIDE, made[-1])
        yield address
    finally:
        docker("rm", "-f", *made)
        docker("network", "rm", INSIDE, OUTSIDE)


def reaches(env: ContainerEnvironment, address: str, port: int) -> bool:
    return run(env, f"nc -w 1 {address} {port} </dev/null").stdout.decode().strip() == GREETING


def test_a_container_reaches_what_is_on_its_network_and_on_an_internal_one_the_outside_through_its_proxy_alone(
    tmp_path: Path, options: ContainerOptions, server: str
) -> None:
    with box_of(tmp_path / "box", replace(options, network=OUTSIDE)) as box:
        assert until(lambda: reaches(box.open(EnvironmentSpec(id="e1")), server, 9000))
    with box_of(tmp_path / "box", replace(options, network=INSIDE)) as box:
        env = box.open(EnvironmentSpec(id="e1"))
        assert until(lambda: reaches(env, "egress", 3128))
        assert not reaches(env, server, 9000)


def networks() -> set[str]:
    """Return the networks that threads of this process are on."""
    found = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError):  # one that ends just now
            found.add(os.readlink(f"/proc/self/task/{thread}/ns/net"))
    return found


def test_a_container_on_a_named_network_is_reached_by_its_loopback_as_long_as_it_is_there(tmp_path: Path, server: str) -> None:
    own = os.readlink("/proc/self/ns/net")
    with box_of(tmp_path / "box", container_options(network=INSIDE)) as box:
        env = box.open(EnvironmentSpec(id="e1"))
        port = serve(env)
        assert ask(env, port).body == b"here GET"
        # No thread of the worker stays in the container. The kernel may have one for a moment after it was joined.
        assert until(lambda: networks() == {own})
        docker("kill", env.container.id)
        assert until(lambda: env.container.has_ended())
        with pytest.raises(EnvironmentGone, match="lost"):
            ask(env, port)
