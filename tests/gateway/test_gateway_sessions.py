"""Creates that fail by themselves among others, and sessions of jobs that nobody uses any more."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from redis.asyncio import BlockingConnectionPool, Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from app.gateway.context import Gateway
from app.gateway.environments import Environments
from app.gateway.errors import classify
from app.gateway.journal import Journal
from app.gateway.records import Record, Records
from app.gateway.sessions import Sessions
from app.journal.database import open_engine
from tangram import ClientClosed
from tangram.calls import Place, execute
from tangram.connection import find_addresses, redis_url
from tangram.session import Session
from tests.gateway.conftest import Served

pytestmark = pytest.mark.real


class Pool(BlockingConnectionPool):
    """Connections of which one request gets none, as where all are taken for too long."""

    refuses = False

    async def get_connection(self, *args: Any, **options: Any) -> Any:
        if self.refuses:
            self.refuses = False
            raise RedisConnectionError("No connection available.")
        return await super().get_connection(*args, **options)


def environments_of(pool: Any, engine: Any) -> Environments:
    journal = Journal(engine)
    return Environments(Records(Redis(connection_pool=pool), journal), journal)


def test_a_create_that_fails_by_itself_leaves_the_environment_to_others_of_its_key(served: Served) -> None:
    pool = Pool.from_url(redis_url(find_addresses(served.live.settings).result_url))
    engine = open_engine(served.live.stack.database_url)

    async def run(blocker: httpx.Client, blocking: str) -> None:
        sessions = Sessions(served.live.settings)
        environments = environments_of(pool, engine)
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
            (failed,), (made,) = [[one for one in done if isinstance(one, kind)] for kind in (RedisConnectionError, Record)]
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
    environments = environments_of(pool, engine)
    try:
        caller = await sessions.caller("too-many")
        # When an environment is to be opened, then that is to be tried again after a while, and counts as the system's affair
        with pytest.raises(RedisConnectionError) as raised:
            await environments.open(caller, key="k")
        refused = classify(raised.value)
        assert (refused.status, "Retry-After" in refused.headers, refused.fault) == (503, True, "infrastructure")
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
                answer = await asyncio.to_thread(
                    http.post, f"/api/v1/environments/{environment}/exec", json={"command": "touch go", "session": "other"}
                )
                assert answer.json()["exit_code"] == 0
                assert (await asyncio.wrap_future(handle.future)).exit_code == 0
                async with asyncio.timeout(60):
                    while len(sessions):
                        await asyncio.sleep(0.05)
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
        assert len(gateway.sessions) == 0
        for one in sessions:
            with pytest.raises(ClientClosed):
                one.submit(execute(Place("job", "t", "env-1"), "true"))

    asyncio.run(run())
    engine.dispose()
