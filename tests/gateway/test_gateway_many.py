"""Many creates at once while a gateway is killed, and sessions of jobs that nobody uses any more."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from redis.asyncio import BlockingConnectionPool, Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from app.gateway.context import Gateway
from app.gateway.environments import Environments
from app.gateway.errors import InfraFailed, Overloaded
from app.gateway.journal import Journal
from app.gateway.records import Record, Records
from app.gateway.sessions import Sessions
from app.journal.database import open_engine
from app.local.processes import Command
from app.local.stack import StackPlan
from tangram import ClientClosed
from tangram.calls import Place, execute
from tangram.connection import find_addresses, redis_url
from tangram.session import Session
from tests.gateway.conftest import Served
from tests.live.support import running
from tests.ports import free_port

KEYS, SENT = 200, 5
"""Each key is sent five times, so that a thousand creates come at once."""

OPENED_BEFORE_KILL = 40


@pytest.fixture
def pair(real_component: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Served]]:
    """Run a stack with two gateways."""
    pytest.importorskip("fastapi", reason="the extra `gateway` is not installed")
    plan = StackPlan(nodes=1, cores=4, memory_mb=10**6, api_nodes=0, gateway_port=free_port())
    with running(tmp_path_factory.mktemp("many") / "state", plan) as live:
        port = free_port()
        live.stack.spawn(Command("second", (sys.executable, "-m", "tangram", "gateway", "--port", str(port))))
        second = Served(live, f"http://127.0.0.1:{port}")
        live.until(lambda: _answers(second.url))
        yield Served(live, plan.gateway_url), second


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.TransportError:
        return False


def standing(served: Served) -> int:
    return int(served.live.rows("SELECT count(*) FROM environments WHERE state = 'open'")[0][0])


def test_a_thousand_creates_outlive_the_death_of_a_gateway_and_open_once_per_key(pair: tuple[Served, Served]) -> None:
    aiohttp = pytest.importorskip("aiohttp", reason="the extra `clients` is not installed")
    first, second = pair
    token = {"X-API-Key": first.token("many")}

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
    with second.http("many") as http:
        assert len(http.get("/v2/sandboxes", params={"limit": 1000}).json()) == KEYS


class Pool(BlockingConnectionPool):
    """Connections of which one request gets none, as where all are taken for too long."""

    refuses = False

    async def get_connection(self, *args: Any, **options: Any) -> Any:
        if self.refuses:
            self.refuses = False
            raise RedisConnectionError("No connection available.")
        return await super().get_connection(*args, **options)


def test_a_create_that_fails_by_itself_leaves_the_environment_to_others_of_its_key(served: Served) -> None:
    pool = Pool.from_url(redis_url(find_addresses(served.live.settings).result_url))
    engine = open_engine(served.live.stack.database_url)

    async def run(blocker: httpx.Client, blocking: str) -> None:
        sessions = Sessions(served.live.settings)
        environments = Environments(Records(Redis(connection_pool=pool)), Journal(engine))
        try:
            caller = await sessions.caller("keyed")
            # Given two creates with the same key, which wait for memory
            both = [asyncio.create_task(environments.open(caller, memory_mb=1000, key="same")) for _ in range(2)]
            waiting = "SELECT 1 FROM actions WHERE job = 'keyed' AND kind = 'cpu.open' AND status = 'waiting'"
            await asyncio.to_thread(served.live.until, lambda: served.live.rows(waiting))
            # When it stands, and one of them cannot write that down
            pool.refuses = True
            await asyncio.to_thread(blocker.delete, f"/api/v1/environments/{blocking}")
            done = await asyncio.gather(*both, return_exceptions=True)
            (failed,), (made,) = [[one for one in done if isinstance(one, kind)] for kind in (InfraFailed, Record)]
            assert "No connection available" in str(failed)
            # Then whoever comes with the key gets the one that stands
            assert (await environments.open(caller, key="same")).id == made.id
            await environments.close(caller, made.id)
        finally:
            await sessions.close()
            await pool.aclose()

    with served.http("blocker") as blocker:
        blocking = blocker.post("/api/v1/environments", json={"memory_mb": 4000}).json()["id"]
        asyncio.run(run(blocker, blocking))
    engine.dispose()
    assert len(served.live.rows("SELECT id FROM environments WHERE job = 'keyed'")) == 1


async def test_a_create_among_too_many_is_to_be_tried_again(served: Served) -> None:
    # Given a gateway all of whose connections to the result store are in use
    url = redis_url(find_addresses(served.live.settings).result_url)
    pool = BlockingConnectionPool.from_url(url, max_connections=1, timeout=0.05)
    taken = await pool.get_connection()
    engine, sessions = open_engine(served.live.stack.database_url), Sessions(served.live.settings)
    environments = Environments(Records(Redis(connection_pool=pool)), Journal(engine))
    try:
        caller = await sessions.caller("too-many")
        # When an environment is to be opened, then that is to be tried again after a while, and counts as the system's affair
        with pytest.raises(Overloaded) as refused:
            await environments.open(caller, key="k")
        assert (refused.value.status, "Retry-After" in refused.value.headers, refused.value.fault) == (503, True, "infrastructure")
        # And it succeeds once there is a connection
        await pool.release(taken)
        made = await environments.open(caller, key="k")
        await environments.close(caller, made.id)
    finally:
        await sessions.close()
        await pool.aclose()
        engine.dispose()


def test_the_session_of_a_job_that_nobody_uses_is_closed(served: Served) -> None:
    async def run() -> None:
        sessions = Sessions(served.live.settings, idle_s=0.4)
        closing = asyncio.create_task(sessions.close_idle())
        try:
            # Given a session with a command that runs, and that nobody waits for
            caller = await sessions.caller("idle")
            with served.http("idle") as http:
                environment = (await asyncio.to_thread(http.post, "/api/v1/environments", json={})).json()["id"]
                place = Place("idle", environment, environment)
                handle = caller.session.submit(execute(place, "until [ -e go ]; do sleep 0.05; done", timeout_s=100))
                del caller
                # Then it stays for many times the time that unused ones have
                await asyncio.sleep(2)
                assert len(sessions) == 1 and not handle.future.done()
                # And it is closed once the command has ended
                answer = await asyncio.to_thread(
                    http.post, f"/api/v1/environments/{environment}/exec", json={"command": "touch go", "session": "other"}
                )
                assert answer.json()["exit_code"] == 0
                assert (await asyncio.wrap_future(handle.future)).exit_code == 0
                async with asyncio.timeout(60):
                    while len(sessions):
                        await asyncio.sleep(0.05)
                # And opened again when it is used again
                caller = await sessions.caller("idle")
                assert len(sessions) == 1
                assert (await asyncio.wrap_future(caller.session.submit(execute(place, "echo again")).future)).stdout == "again\n"
        finally:
            closing.cancel()
            await sessions.close()

    asyncio.run(run())


def breaking_stop(monkeypatch: pytest.MonkeyPatch, job: str) -> None:
    """Have the end of a job's session fail once its connections are closed."""
    stop = Session.stop

    def broken(self: Session, *options: Any) -> None:
        stop(self, *options)
        if self.job == job:
            raise RuntimeError("stop is broken")

    monkeypatch.setattr(Session, "stop", broken)


def test_a_session_that_cannot_be_closed_holds_no_other_one_open(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    breaking_stop(monkeypatch, "stuck")

    async def run() -> None:
        sessions = Sessions(served.live.settings, idle_s=0.2)
        # Given idle sessions, the first of which cannot be closed
        for job in ("stuck", "second"):
            await sessions.caller(job)
        closing = asyncio.create_task(sessions.close_idle())
        # Then the other one is closed, and so are those that come later
        async with asyncio.timeout(30):
            while len(sessions):
                await asyncio.sleep(0.05)
            await sessions.caller("third")
            while len(sessions):
                await asyncio.sleep(0.05)
        assert not closing.done()
        closing.cancel()

    asyncio.run(run())


def test_a_gateway_closes_everything_whatever_has_failed_before(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    breaking_stop(monkeypatch, "stuck")
    engine = open_engine(served.live.stack.database_url)

    async def fails(_: Sessions) -> None:
        raise RuntimeError("a task is broken")

    async def run() -> None:
        # Given a gateway one of whose tasks has failed, with two sessions, one of which cannot be closed
        monkeypatch.setattr(Sessions, "close_idle", fails)
        gateway = Gateway(served.live.settings, engine)
        async with gateway.running():
            sessions = [(await gateway.sessions.caller(job)).session for job in ("stuck", "second")]
        # When it ends, then both are closed
        assert len(gateway.sessions) == 0
        for one in sessions:
            with pytest.raises(ClientClosed):
                one.submit(execute(Place("job", "t", "env-1"), "true"))

    asyncio.run(run())
    engine.dispose()
