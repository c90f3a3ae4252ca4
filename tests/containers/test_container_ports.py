"""Requests to servers in containers: on which network they are, and what becomes of one whose container ends."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from tests.sandboxes.conftest import container_options
from tests.sandboxes.test_ports import ask, serve
from tests.workers_cpu.support import until
from workers.cpu.abstract import EnvironmentSpec
from workers.cpu.errors import EnvironmentGone

from .conftest import node_name
from .support import box_of, docker

pytestmark = pytest.mark.real


def networks() -> set[str]:
    """Return the networks that threads of this process are on."""
    found = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError):  # one that ends just now
            found.add(os.readlink(f"/proc/self/task/{thread}/ns/net"))
    return found


def test_a_container_on_a_named_network_is_reached_by_its_loopback_as_long_as_it_is_there(tmp_path: Path, image: str) -> None:
    name, own = node_name("ports"), os.readlink("/proc/self/ns/net")
    docker("network", "create", "--internal", name)
    try:
        with box_of(tmp_path / "box", container_options(network=name)) as box:
            env = box.open(EnvironmentSpec(id="e1"))
            port = serve(env)
            assert ask(env, port).body == b"here GET"
            # No thread of the worker stays in the container. The kernel may have one for a moment after it was joined.
            assert until(lambda: networks() == {own})
            docker("kill", env.container.id)
            assert until(lambda: env.container.has_ended())
            with pytest.raises(EnvironmentGone, match="lost"):
                ask(env, port)
    finally:
        docker("network", "rm", name)
