"""Several processes of a gateway, deaths of one, of connections: nothing runs twice, and no failure of ours is a verdict."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.support import started
from tests.gateway.conftest import Served, options_of, serving
from tests.ports import free_port

pytestmark = pytest.mark.real

MEMORY_MB = 10**6
BLOCKING_MB = MEMORY_MB - 96
"""What leaves too little memory for anything else."""

KEYS, SENT = 80, 5
"""Each key is sent five times, so that hundreds of creates come at once."""

OPENED_BEFORE_KILL = 20


@pytest.fixture(scope="module")
def both(real_component: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Served]]:
    """Run a stack with two gateways."""
    with (
        serving(tmp_path_factory.mktemp("life"), cores=4, memory_mb=MEMORY_MB) as first,
        first.beside("-m", "tangram", "gateway") as second,
    ):
        yield first, second


@pytest.fixture
def pair(both: tuple[Served, Served]) -> Iterator[tuple[Served, Served]]:
    """Return the two gateways of a stack whose processes a test may kill: what another one killed is started again, and nothing is open."""
    live = both[0].live
    live.repair()
    for served in both:
        live.until(served.is_ready)
    yield both
    with live.client("tests") as client:
        client.cancel(job="tests")
    live.until(lambda: not live.rows("SELECT id FROM environments WHERE ended_at IS NULL"))
    live.until(lambda: not live.rows("SELECT id FROM actions WHERE ended_at IS NULL"))


def running_commands(served: Served) -> int:
    return len(served.live.rows("SELECT id FROM actions WHERE kind = 'cpu.exec' AND status = 'running'"))


def openings(served: Served) -> int:
    return len(served.live.rows("SELECT id FROM actions WHERE kind = 'cpu.open' AND status = 'waiting'"))


def test_what_one_process_began_another_one_ends_when_it_dies(pair: tuple[Served, Served]) -> None:
    first, second = pair
    key = {"Idempotency-Key": "k"}
    token = {"X-API-Key": first.token("tests")}
    with httpx.Client(headers=token, timeout=60) as http, ThreadPoolExecutor(3) as threads:
        # Given an environment of the first process, that the second one knows by the same key
        opened = http.post(f"{first.url}/api/v1/environments", json={"lease_s": 3600}, headers=key).json()
        assert http.post(f"{second.url}/api/v1/environments", json={"lease_s": 3600}, headers=key).json() == opened
        path = f"/api/v1/environments/{opened['id']}"
        # And a command that the first one waits for
        slow = {"command": "echo ran >> ledger; while [ ! -e go ]; do sleep 0.05; done; cat ledger"}
        waiting = threads.submit(http.post, f"{first.url}{path}/exec", json=slow, headers=key)
        first.live.until(lambda: running_commands(first) == 1)
        # When the first one is killed, and its caller comes to the second one, twice
        first.live.process("gateway").kill()
        with pytest.raises(httpx.TransportError):
            waiting.result()
        again = [threads.submit(http.post, f"{second.url}{path}/exec", json=slow, headers=key) for _ in range(2)]
        assert http.post(f"{second.url}{path}/exec", json={"command": "touch go", "session": "other"}).json()["exit_code"] == 0
        # Then both get what the one run printed
        assert [one.result().json()["stdout"] for one in again] == ["ran\n", "ran\n"]
        # And the second one closes what the first one opened, when its lease is over
        assert http.post(f"{second.url}{path}/lease", json={"lease_s": 0.1}).status_code == 200
        state = f"SELECT state FROM environments WHERE id = '{opened['id']}'"
        first.live.until(lambda: first.live.rows(state) == [("closed",)])


def test_a_program_beside_all_shells_does_not_wait_for_one_of_another_gateway(pair: tuple[Served, Served]) -> None:
    first, second = pair
    with httpx.Client(headers={"X-API-Key": first.token("tests")}, timeout=60) as http, ThreadPoolExecutor(1) as threads:
        # Given a program that runs through the first gateway until another one lets it go
        assert http.post(f"{first.url}/envs/rex/create_session", json={"startup_timeout": 60}).status_code == 200
        slow = {"command": "until [ -e go ]; do sleep 0.05; done", "shell": True}
        waiting = threads.submit(http.post, f"{first.url}/envs/rex/execute", json=slow)
        first.live.until(lambda: running_commands(first) == 1)
        # When that comes through the second one, then both end
        assert http.post(f"{second.url}/envs/rex/execute", json={"command": ["touch", "go"]}).json()["exit_code"] == 0
        assert waiting.result().json()["exit_code"] == 0


def test_code_whose_gateway_dies_is_run_again_by_another_one(pair: tuple[Served, Served]) -> None:
    first, second = pair
    body = {"language": "bash", "code": "echo ran", "run_timeout": 10, "memory_limit_MB": 512}
    with httpx.Client(headers={"X-API-Key": first.token("tests")}, timeout=60) as http, ThreadPoolExecutor(1) as threads:
        # Given code that waits for memory, and whose caller has left it behind
        blocking = http.post(f"{first.url}/api/v1/environments", json={"memory_mb": BLOCKING_MB}).json()["id"]
        with pytest.raises(httpx.ReadTimeout):
            http.post(f"{first.url}/run_code", json=body, timeout=0.5)
        with first.store() as store:
            first.live.until(lambda: store.keys("tangram-gw-abandoned-*"))
        # When its gateway is killed, and the caller comes to another one
        first.live.process("gateway").kill()
        again = threads.submit(http.post, f"{second.url}/run_code", json=body)
        http.delete(f"{second.url}/api/v1/environments/{blocking}")
        # Then it has the answer of a new run
        assert again.result().status_code == 200, again.result().text
        assert again.result().json()["run_result"]["stdout"] == "ran\n"


def test_an_environment_whose_gateway_dies_while_it_opens_is_open_once_a_shell_is_made(pair: tuple[Served, Served]) -> None:
    first, second = pair
    with httpx.Client(headers={"X-API-Key": first.token("tests")}, timeout=60) as http, ThreadPoolExecutor(1) as threads:
        # Given an environment that waits for memory
        blocking = http.post(f"{first.url}/api/v1/environments", json={"memory_mb": BLOCKING_MB}).json()["id"]
        opening = threads.submit(http.post, f"{first.url}/api/v1/environments", json={"name": "named", "memory_mb": 512})
        first.live.until(lambda: openings(first) == 1)
        # When its gateway is killed, and a client of SWE-ReX comes to another one
        first.live.process("gateway").kill()
        with pytest.raises(httpx.TransportError):
            opening.result()
        assert not http.get(f"{second.url}/envs/named/is_alive").json()["is_alive"]
        http.delete(f"{second.url}/api/v1/environments/{blocking}")
        assert http.post(f"{second.url}/envs/named/create_session", json={"startup_timeout": 60}).status_code == 200
        # Then the environment is known to be open, and there is one of it
        assert http.get(f"{second.url}/envs/named/is_alive").json()["is_alive"]
        assert [one["state"] for one in http.get(f"{second.url}/api/v1/environments").json()] == ["open"]


def test_a_process_of_e2b_is_joined_through_another_gateway_when_its_own_dies(pair: tuple[Served, Served]) -> None:
    e2b = pytest.importorskip("e2b", reason="the extra `clients` is not installed")
    first, second = pair
    options = options_of(first, "tests")
    # Given a command that runs through the first gateway
    sandbox = e2b.Sandbox.create(**options)
    running = sandbox.commands.run("echo ran >> ledger; until [ -e go ]; do sleep 0.05; done; cat ledger", background=True)
    first.live.until(lambda: running_commands(first) == 1)
    # When that is killed
    first.live.process("gateway").kill()
    with pytest.raises(e2b.exceptions.SandboxUnreachableException):
        running.wait()
    # Then the second one knows sandbox and process, and the command runs once
    again = e2b.Sandbox.connect(sandbox.sandbox_id, **{**options, "api_url": second.url, "sandbox_url": second.url})
    assert [one.pid for one in again.commands.list()] == [running.pid]
    joined = again.commands.connect(running.pid)
    again.files.write("go", "")
    assert joined.wait().stdout == "ran\n"
    assert again.commands.list() == []


def standing(served: Served) -> int:
    return int(served.live.rows("SELECT count(*) FROM environments WHERE state = 'open'")[0][0])


def test_hundreds_of_creates_outlive_the_death_of_a_gateway_and_open_once_per_key(pair: tuple[Served, Served]) -> None:
    aiohttp = pytest.importorskip("aiohttp", reason="the extra `clients` is not installed")
    first, second = pair
    token = {"X-API-Key": first.token("tests")}

    async def create(http: Any, key: str) -> str:
        """Create as clients do: what was not answered, or may be tried again, is sent again under the same key."""
        url = first.url
        while True:
            try:
                body = {"templateID": "base", "timeout": 3600}
                async with http.post(f"{url}/v2/sandboxes", json=body, headers={"Idempotency-Key": key}) as answer:
                    said = await answer.text()
            except aiohttp.ClientError:
                url = second.url
                continue
            if answer.status == 201:
                return str(json.loads(said)["sandboxID"])
            assert answer.status in (502, 503, 504), said
            await asyncio.sleep(float(answer.headers.get("Retry-After", "0.5")))

    async def kill_first() -> None:
        while await asyncio.to_thread(standing, first) < OPENED_BEFORE_KILL:
            await asyncio.sleep(0.05)
        first.live.process("gateway").kill()

    async def all_of_them() -> list[tuple[str, str]]:
        keys = [f"key-{number}" for number in range(KEYS)] * SENT
        # httpx takes several times as long for a call, which the gateways would lack
        async with aiohttp.ClientSession(headers=token, connector=aiohttp.TCPConnector(limit=0)) as http:
            killing = asyncio.create_task(kill_first())
            sandboxes = await asyncio.gather(*(create(http, key) for key in keys))
            await killing
            return list(zip(keys, sandboxes, strict=True))

    got = asyncio.run(all_of_them())
    # All creates of a key have the same sandbox, each key its own, and there are no others
    assert set(Counter(set(got)).values()) == {1} and len(set(got)) == KEYS
    assert len({sandbox for _, sandbox in got}) == KEYS
    first.live.until(lambda: standing(first) == KEYS)
    with second.http("tests") as http:
        assert len(http.get("/v2/sandboxes", params={"limit": 1000}).json()) == KEYS


@pytest.mark.real
def test_up_serves_a_gateway_where_a_port_is_set(tmp_path: Path) -> None:
    pytest.importorskip("fastapi", reason="the extra `gateway` is not installed")
    port = free_port()
    (tmp_path / "services.toml").write_text("[quotas.q]\nconcurrency = 1\n")
    with started(tmp_path, "up", "--cells", "1", TANGRAM_GATEWAY_PORT=str(port)) as up:
        assert up.stderr is not None
        lines = [up.stderr.readline() for _ in range(2)]
        assert f"http://127.0.0.1:{port}" in lines[1] and "tangram token new" in lines[1], lines
        assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
