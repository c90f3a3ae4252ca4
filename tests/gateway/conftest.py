"""A stack with a gateway as a process of its own, and callers of it."""

from __future__ import annotations

import functools
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from redis.asyncio import Redis as AsyncRedis

from app.cli.state import read_state
from app.gateway.tokens import make_token
from app.local.processes import Command
from app.local.stack import StackPlan
from tangram.connection import redis_url
from tests.conftest import RedisUrls
from tests.live.support import Live, running
from tests.ports import free_port

LANGUAGES = """
[shout]
file = "text"
run = "tr a-z A-Z < text"
tool = "tr"
"""

SERVICES = "".join(
    f'[services.{name}]\nengine = "stub"\ntask = "{task}"\ncells = [1]\nmemory_mb = {memory_mb}\nmax_concurrency = {most}\n{more}'
    for name, task, memory_mb, most, more in (
        ("judge", "score", 100, 8, ""),
        ("slow", "score", 100, 1, "instances = 1\n"),
        ("teacher", "logprobs", 100, 8, ""),
        ("broken", "score", 200, 8, ""),
        ("broken-teacher", "logprobs", 200, 8, ""),
    )
)
"""The weights of those called `broken` are spoilt, by `broken_engine.py`."""

QUEUE_LIMIT = 8
MEMORY_MB = 10**6
"""What the node of the two gateways has."""


@dataclass
class Served:
    """A stack that is up, and its gateway."""

    live: Live
    url: str

    def token(self, job: str) -> str:
        """Return a fresh token of a job."""
        return make_token(self.live.journal, job)

    def store(self) -> redis.Redis:
        """Return the result store."""
        return redis.Redis.from_url(redis_url(self.live.stack.result_url))

    def infra_failed(self, cause: str | None = None) -> dict[str, int]:
        """Return how many failures of the system a cause has in the gateway's metrics by shape, or all by cause and shape."""
        start = "tangram_gateway_infra_failed_total{" + (f'cause="{cause}",shape="' if cause else "")
        lines = [line.removeprefix(start) for line in httpx.get(f"{self.url}/metrics").text.splitlines() if line.startswith(start)]
        return {line.rpartition("}")[0].rstrip('"'): int(float(line.split()[-1])) for line in lines}

    def failures(self) -> Counter[str]:
        """Return how many actions of the stack have failed by the system's fault so far, by cause."""
        return Counter(read_state(self.live.settings)[0]["infra_failed"])

    def connected(self) -> socket.socket:
        """Return a connection to the gateway."""
        url = httpx.URL(self.url)
        return socket.create_connection((url.host, url.port or 80), 60)

    def begun(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> socket.socket:
        """Return a connection on which a request was sent, and of which nothing is read."""
        request = httpx.Request("POST", f"{self.url}{path}", json=body, headers=headers)
        lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in request.headers.items()), "", ""]
        connection = self.connected()
        connection.sendall("\r\n".join(lines).encode() + request.content)
        return connection

    def is_ready(self) -> bool:
        """Return whether the gateway can be used."""
        try:
            return httpx.get(f"{self.url}/ready").status_code == 200
        except httpx.TransportError:
            return False

    @contextmanager
    def beside(self, *argv: str, host: str = "127.0.0.1", **variables: str) -> Iterator[Served]:
        """Run a further gateway of the stack, of whose command the words `argv` are the beginning; a host and a port follow them."""
        port = free_port()
        other = Served(self.live, f"http://{host}:{port}")
        self.live.stack.spawn(
            Command("beside", (sys.executable, *argv, "--host", host, "--port", str(port)), {**self.live.plan.variables, **variables})
        )
        try:
            self.live.until(other.is_ready)
            yield other
        finally:
            self.live.stack._processes.pop("beside").stop(10)

    def http(self, job: str = "tests") -> httpx.Client:
        """Return a caller for a job."""
        return httpx.Client(base_url=self.url, headers={"X-API-Key": self.token(job)}, timeout=180)


# A busy machine may need longer for an answer than the five seconds for which httpx waits where a call says nothing.
for _step in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, _step, 60.0)

# Each client reads all certificates of the machine, which takes longer than several calls. They share them: no call here is encrypted.
_transports: Any = httpx._transports.default
_transports.create_ssl_context = functools.cache(_transports.create_ssl_context)


@contextmanager
def serving(folder: Path, **fields: Any) -> Iterator[Served]:
    """Run a stack with a gateway; `fields` are those of its plan that are not as usual in these tests."""
    pytest.importorskip("fastapi", reason="the extra `gateway` is not installed")
    plan = StackPlan(**{"nodes": 1, "cores": 2, "memory_mb": 4096, "api_nodes": 0, "gateway_port": free_port(), **fields})
    with running(folder / "state", plan) as live:
        yield Served(live, plan.gateway_url)


@pytest.fixture(scope="package")
def served(real_component: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Run the stack that the tests of the gateway share; none of them may harm it."""
    folder = tmp_path_factory.mktemp("gateway")
    (folder / "languages.toml").write_text(LANGUAGES)
    limits = {
        "TANGRAM_GATEWAY_BODY_MB": "8",
        "TANGRAM_GATEWAY_PATIENCE_S": "1",
        "TANGRAM_GATEWAY_REWARD_S": "1",
        "TANGRAM_QUEUE_LIMIT": str(QUEUE_LIMIT),
        "TANGRAM_GATEWAY_LANGUAGES": str(folder / "languages.toml"),
    }
    (folder / "services.toml").write_text(SERVICES)
    gpus = {"cells": 2, "cell_memory_mb": 2048, "services_file": folder / "services.toml", "include": ("tests.gateway.broken_engine",)}
    with serving(folder, variables=limits, **gpus) as served:
        yield served


@pytest.fixture(scope="package")
def one_core(real_component: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Run a stack with one core, in whose queue one action of a job may wait. Its tests see the files of commands on the host."""
    variables = {"TANGRAM_QUEUE_LIMIT": "1", "TANGRAM_ISOLATION": "none"}
    with serving(tmp_path_factory.mktemp("one-core"), policy="fcfs", cores=1, variables=variables) as served:
        yield served


@pytest.fixture(scope="package")
def both(real_component: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Served]]:
    """Run a stack with two gateways."""
    with (
        serving(tmp_path_factory.mktemp("both"), policy="fcfs", cores=5, memory_mb=MEMORY_MB) as first,
        first.beside("-m", "tangram", "gateway") as second,
    ):
        yield first, second


@pytest.fixture
def pair(both: tuple[Served, Served]) -> Iterator[tuple[Served, Served]]:
    """Return the two gateways of a stack whose processes a test may kill: what another one killed is started again, and nothing is open."""
    live, standing = both[0].live, "SELECT DISTINCT job FROM environments WHERE ended_at IS NULL"
    live.repair()
    for served in both:
        live.until(served.is_ready)
    yield both
    for (job,) in live.rows(standing):
        with live.client(job) as client:
            client.cancel(job=job)
    live.until(lambda: not live.rows(standing))
    live.until(lambda: not live.rows("SELECT id FROM actions WHERE ended_at IS NULL"))


@pytest.fixture
async def empty_store(redis_urls: RedisUrls) -> AsyncIterator[AsyncRedis]:
    """Return an empty result store, without a stack."""
    async with AsyncRedis(unix_socket_path=str(redis_urls.socket)) as opened:
        yield opened


@pytest.fixture(scope="module")
def http(served: Served) -> Iterator[httpx.Client]:
    """Return a caller of the job `tests`."""
    with served.http() as client:
        yield client


@pytest.fixture
def environment(http: httpx.Client) -> Iterator[str]:
    """Open an environment and return its address in the native API."""
    opened = http.post("/api/v1/environments", json={})
    assert opened.status_code == 201, opened.text
    address = f"/api/v1/environments/{opened.json()['id']}"
    yield address
    http.delete(address)


@pytest.fixture
def run(http: httpx.Client, environment: str) -> Callable[..., dict[str, object]]:
    """Return what runs a command in the environment and gives the answer."""

    def command(line: str, **body: object) -> dict[str, object]:
        answer = http.post(f"{environment}/exec", json={"command": line, **body})
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    return command


def options_of(served: Served, job: str) -> dict[str, str]:
    """Return the options with which E2B's client is used for a job."""
    return {"api_key": served.token(job), "api_url": served.url, "sandbox_url": served.url}


@pytest.fixture(scope="package")
def e2b_options(served: Served) -> dict[str, str]:
    """Return the options of E2B's client for the job `e2b`."""
    return options_of(served, "e2b")


@pytest.fixture(scope="module")
def e2b_sandbox(e2b_options: dict[str, str]) -> Iterator[Any]:
    """Open a sandbox of E2B's client, with the variable GREETING, which lasts for as long as a slow machine may need for a module."""
    e2b = pytest.importorskip("e2b", reason="the extra `clients` is not installed")
    sandbox = e2b.Sandbox.create(timeout=3600, envs={"GREETING": "hello"}, metadata={"task": "shared"}, **e2b_options)
    yield sandbox
    sandbox.kill()


@pytest.fixture
def e2b_headers(e2b_sandbox: Any) -> dict[str, str]:
    """Return what the client sends with every call to the sandbox."""
    return {"E2b-Sandbox-Id": e2b_sandbox.sandbox_id, "X-Access-Token": e2b_sandbox._envd_access_token}
