"""Creates that fail by themselves among others, and sessions of jobs that nobody uses any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

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


@dataclass
class Parts:
    """Parts of a gateway of the stack, with connections of their own to the result store."""

    sessions: Sessions
    environments: Environments
    pool: Any


@asynccontextmanager
async def parts(served: Served, kind: type[BlockingConnectionPool], **limits: Any) -> AsyncIterator[Parts]:
    pool = kind.from_url(redis_url(find_addresses(served.live.settings).result_url), **limits)
    engine, sessions = open_engine(served.live.stack.database_url), Sessions(served.live.settings)
    journal = Journal(engine)
    try:
        yield Parts(sessions, Environments(Records(Redis(connection_pool=pool), journal), journal), pool)
    finally:
        await sessions.close()
        await pool.aclose()
        engine.dispose()


async def test_a_create_that_fails_by_itself_leaves_the_environment_to_others_of_its_key(served: Served) -> None:
    with served.http("blocker") as blocker:
        blocking = blocker.post("/api/v1/environments", json={"memory_mb": 4000}).json()["id"]
        async with parts(served, Pool) as own:
            caller = await own.sessions.caller("keyed")
            # Given two creates with the same key, which wait for memory
            both = [asyncio.create_task(own.environments.open(caller, memory_mb=1000, key="same")) for _ in range(2)]
            waiting = "SELECT 1 FROM actions WHERE job = 'keyed' AND kind = 'cpu.open' AND status = 'waiting'"
            await asyncio.to_thread(served.live.until, lambda: served.live.rows(waiting))
            # When it stands, and one of them cannot write that down
            own.pool.refuses = True
            await asyncio.to_thread(blocker.delete, f"/api/v1/environments/{blocking}")
            done = await asyncio.gather(*both, return_exceptions=True)
            (failed,), (made,) = [[one for one in done if isinstance(one, kind)] for kind in (RedisConnectionError, Record)]
            assert "No connection available" in str(failed)
            # Then whoever comes with the key gets the one that stands
            assert (await own.environments.open(caller, key="same")).id == made.id
            await own.environments.close(caller, made.id)
    assert len(served.live.rows("SELECT id FROM environments WHERE job = 'keyed'")) == 1


async def test_a_create_among_too_many_is_to_be_tried_again(served: Served) -> None:
    # Given a gateway all of whose connections to the result store are in use
    async with parts(served, BlockingConnectionPool, max_connections=1, timeout=0.05) as own:
        taken = await own.pool.get_connection()
        caller = await own.sessions.caller("too-many")
        # When an environment is to be opened, then that is to be tried again after a while, and counts as the system's affair
        with pytest.raises(RedisConnectionError) as raised:
            await own.environments.open(caller, key="k")
        refused = classify(raised.value)
        assert (refused.status, "Retry-After" in refused.headers, refused.fault) == (503, True, "infrastructure")
        await own.pool.release(taken)
        made = await own.environments.open(caller, key="k")
        await own.environments.close(caller, made.id)


async def none_is_left(sessions: Sessions) -> None:
    async with asyncio.timeout(60):
        while len(sessions):
            await asyncio.sleep(0.05)


async def test_the_session_of_a_job_that_nobody_uses_is_closed(served: Served) -> None:
    sessions = Sessions(served.live.settings, idle_s=0.4)
    closing = asyncio.create_task(sessions.close_idle())
    try:
        # Given a session with a command that runs, and that nobody waits for
        caller = await sessions.caller("idle")
        with served.http("idle") as http:
            environment = (await asyncio.to_thread(http.post, "/api/v1/environments", json={})).json()["id"]
            place, path = Place("idle", environment, environment), f"/api/v1/environments/{environment}/exec"
            handle = caller.session.submit(execute(place, "until [ -e go ]; do sleep 0.05; done", timeout_s=100))
            del caller
            # Then it stays for many times the time that unused ones have
            await asyncio.sleep(2)
            assert len(sessions) == 1 and not handle.future.done()
            answer = await asyncio.to_thread(http.post, path, json={"command": "touch go", "session": "other"})
            assert answer.json()["exit_code"] == 0
            assert (await asyncio.wrap_future(handle.future)).exit_code == 0
            await none_is_left(sessions)
            caller = await sessions.caller("idle")
            assert len(sessions) == 1
            assert (await asyncio.wrap_future(caller.session.submit(execute(place, "echo again")).future)).stdout == "again\n"
    finally:
        closing.cancel()
        await sessions.close()


def breaking_stop(monkeypatch: pytest.MonkeyPatch, job: str) -> None:
    """Have the end of a job's session fail once its connections are closed."""
    stop = Session.stop

    def broken(self: Session, *options: Any) -> None:
        stop(self, *options)
        if self.job == job:
            raise RuntimeError("stop is broken")

    monkeypatch.setattr(Session, "stop", broken)


async def test_a_session_that_cannot_be_closed_holds_no_other_one_open(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    breaking_stop(monkeypatch, "stuck")
    sessions = Sessions(served.live.settings, idle_s=0.2)
    # Given idle sessions, the first of which cannot be closed
    for job in ("stuck", "second"):
        await sessions.caller(job)
    closing = asyncio.create_task(sessions.close_idle())
    # Then the other one is closed, and so are those that come later
    await none_is_left(sessions)
    await sessions.caller("third")
    await none_is_left(sessions)
    assert not closing.done()
    closing.cancel()


async def test_a_gateway_closes_everything_whatever_has_failed_before(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    breaking_stop(monkeypatch, "stuck")
    engine = open_engine(served.live.stack.database_url)

    async def fails(_: Sessions) -> None:
        raise RuntimeError("a task is broken")

    # Given a gateway one of whose tasks has failed, with two sessions, one of which cannot be closed
    monkeypatch.setattr(Sessions, "close_idle", fails)
    gateway = Gateway(served.live.settings, engine)
    async with gateway.running():
        sessions = [(await gateway.sessions.caller(job)).session for job in ("stuck", "second")]
    assert len(gateway.sessions) == 0
    for one in sessions:
        with pytest.raises(ClientClosed):
            one.submit(execute(Place("job", "t", "env-1"), "true"))
    engine.dispose()
