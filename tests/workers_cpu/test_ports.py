"""Of a port that two listen on, the server of the environment is asked, where nothing sets it apart from the host."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.sandboxes.test_ports import ask, host_service, serve

from .conftest import make
from .support import open_one


def test_a_service_of_the_host_that_is_nearer_than_the_servers_socket_is_not_reached(tmp_path: Path) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    # Given a service on the host's loopback, and a server of an environment on the same port of all addresses of IPv6
    box = make(tmp_path / "host", "none")
    env = open_one(box)
    with host_service() as listening:
        port = serve(env, listening.getsockname()[1], address="::")
        # Then the server is asked, where nobody but it can answer
        assert ask(env, port).body == b"here GET"
        with pytest.raises(BlockingIOError):
            listening.accept()
    box.close()
