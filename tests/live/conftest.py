"""Whole stacks: Redis, a scheduler and workers as processes of their own, and clients of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from app.local.stack import StackPlan
from app.replay.outside_api import OutsideApi
from tangram import Client
from tests.conftest import RedisServer
from tests.live.network import Network
from tests.live.support import INCLUDE, ORPHAN_S, SERVICES, Live, running


@pytest.fixture(scope="package")
def live(real_component: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Run the stack that most tests share; none of them may harm it. Who needs more than a CPU node asks for `gpu_node` or `api_node`."""
    folder = tmp_path_factory.mktemp("live")
    (folder / "services.toml").write_text(SERVICES)
    plan = StackPlan(nodes=1, cores=2, memory_mb=4096, api_nodes=0, services_file=folder / "services.toml", include=INCLUDE)
    with running(folder / "state", plan) as started:
        yield started


@pytest.fixture(scope="package")
def gpu_node(live: Live) -> None:
    live.add(cells=2, cell_memory_mb=1200)


@pytest.fixture(scope="package")
def api_node(live: Live) -> None:
    live.add(api_nodes=1)


@pytest.fixture(scope="package")
def harmed(real_component: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Run the stack whose processes, and those of its clients, stand still: whoever does is given up after some seconds."""
    given_up = {"TANGRAM_NODE_LOST_S": "15", "TANGRAM_ORPHAN_S": str(ORPHAN_S), "TANGRAM_TAKEOVER_S": "10"}
    variables = {"TANGRAM_BEAT_S": "3", **given_up}
    plan = StackPlan(cores=4, memory_mb=4096, api_nodes=0, include=INCLUDE, variables=variables)
    with running(tmp_path_factory.mktemp("harmed"), plan) as started:
        yield started


@pytest.fixture
def client(live: Live) -> Iterator[Client]:
    with live.client("tests") as connected:
        yield connected


@pytest.fixture(scope="session")
def outside() -> Iterator[OutsideApi]:
    with OutsideApi() as api:
        yield api


@pytest.fixture
def network(own_redis: RedisServer) -> Iterator[Network]:
    """Return a network with a server of its own behind it."""
    network = Network(own_redis.socket.with_name("network.sock"), own_redis.socket)
    yield network
    network.close()
