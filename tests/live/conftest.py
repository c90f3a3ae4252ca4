"""Whole stacks: Redis, a scheduler and workers as processes of their own, and clients of them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from app.journal.database import open_engine
from app.local.stack import StackPlan
from app.replay.outside_api import OutsideApi
from bench.quotas import outside as counting_server
from tangram import Client
from tests.conftest import RedisServer
from tests.journals import new_journal
from tests.live.network import Network
from tests.live.support import INCLUDE, SERVICES, Live, running


@pytest.fixture(scope="session")
def services_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file that declares stub services and quotas."""
    path = tmp_path_factory.mktemp("services") / "services.toml"
    path.write_text(SERVICES)
    return path


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """Return an empty journal."""
    engine = open_engine(new_journal(tmp_path / "tangram.sqlite"))
    yield engine
    engine.dispose()


@pytest.fixture(scope="package")
def live(real_component: None, tmp_path_factory: pytest.TempPathFactory, services_file: Path) -> Iterator[Live]:
    """Run the stack that most tests share; none of them may harm it. Who needs more than a CPU node asks for `gpu_node` or `api_node`."""
    folder = tmp_path_factory.mktemp("live")
    plan = StackPlan(nodes=1, cores=2, memory_mb=4096, api_nodes=0, services_file=services_file, include=INCLUDE)
    with running(folder, plan) as started:
        yield started


@pytest.fixture(scope="package")
def gpu_node(live: Live) -> None:
    """Have a GPU node in the shared stack."""
    live.add(cells=2, cell_memory_mb=1200)


@pytest.fixture(scope="package")
def api_node(live: Live) -> None:
    """Have an API node in the shared stack."""
    live.add(api_nodes=1)


@pytest.fixture(scope="module")
def repairable_stack(real_component: None, tmp_path_factory: pytest.TempPathFactory, services_file: Path) -> Iterator[Live]:
    """Run the stack of `repaired`."""
    plan = StackPlan(cores=4, memory_mb=4096, api_nodes=0, services_file=services_file, include=INCLUDE)
    with running(tmp_path_factory.mktemp("repaired"), plan) as started:
        yield started


@pytest.fixture
def repaired(repairable_stack: Live) -> Live:
    """Return a stack whose processes a test may kill: they are started again for the next test of the module."""
    repairable_stack.repair()
    return repairable_stack


@pytest.fixture
def own_stack(real_component: None, tmp_path: Path, services_file: Path) -> Iterator[Callable[..., Live]]:
    """Return what starts a stack that the test may do anything to."""
    with contextlib.ExitStack() as stacks:

        def start(**plan: Any) -> Live:
            usual: dict[str, Any] = {"nodes": 1, "cores": 2, "memory_mb": 4096, "api_nodes": 0, "services_file": services_file}
            return stacks.enter_context(running(tmp_path / f"state-{len(list(tmp_path.iterdir()))}", StackPlan(**usual | plan)))

        yield start


@pytest.fixture
def client(live: Live) -> Iterator[Client]:
    """Return a client of the shared stack."""
    with live.client("tests") as connected:
        yield connected


@pytest.fixture(scope="session")
def outside() -> Iterator[OutsideApi]:
    """Run an outside API."""
    with OutsideApi() as api:
        yield api


class _Moody(BaseHTTPRequestHandler):
    """Refuses, breaks or answers as its path says, so many times; then answers 200."""

    protocol_version = "HTTP/1.1"
    seen: dict[str, list[float]]

    def _reply(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        kind, times = self.path.strip("/").split("/")[:2]
        seen = self.seen.setdefault(self.path, [])
        seen.append(time.monotonic())
        if len(seen) > int(times):
            self._send(200, {})
        elif kind == "broken":
            self.close_connection = True
        elif kind == "date":
            self._send(429, {"Retry-After": self.date_time_string(int(time.time()) + 2)})
        elif kind == "cost":
            self._send(200, {"X-Cost": "20"})
        else:
            self._send(int(kind), {})

    do_GET = do_POST = _reply

    def _send(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": "0", **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Run a server that counts, in a process of its own."""
    with counting_server() as url:
        yield url


@pytest.fixture
def moody() -> Iterator[tuple[str, dict[str, list[float]]]]:
    """Run a server that fails as it is told to; give where it is and when each path was asked for."""
    seen: dict[str, list[float]] = {}
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Moody,), {"seen": seen}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", seen
    server.shutdown()
    server.server_close()
    thread.join(60)


@pytest.fixture
def network(own_redis: RedisServer) -> Iterator[Network]:
    """Return a network with a server of its own behind it."""
    network = Network(own_redis.socket.with_name("network.sock"), own_redis.socket)
    yield network
    network.close()
