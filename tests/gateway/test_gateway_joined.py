"""Runs that are left behind by their callers, and who joins them; two of `JoinedRuns` stand for two processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

pytest.importorskip("fastapi", reason="the extra `gateway` is not installed")

from redis.asyncio import Redis
from starlette.requests import Request

from app.gateway import joined
from app.gateway.errors import InfraFailed, StillRunning
from app.gateway.joined import JoinedRuns
from tangram.connection import redis_url
from tests.gateway.conftest import Served


@pytest.fixture
async def pair(served: Served) -> AsyncIterator[tuple[JoinedRuns, JoinedRuns]]:
    store = Redis.from_url(redis_url(served.live.stack.result_url))
    runs = JoinedRuns(store), JoinedRuns(store)
    yield runs
    for each in runs:
        await each.close()
    await store.aclose()


class Work:
    """What a call begins; it ends when it is let go."""

    def __init__(self, result: str | Exception) -> None:
        self.result = result
        self.begun = 0
        self.cancelled, self.ended = asyncio.Event(), asyncio.Event()
        self.go = asyncio.Event()

    async def __call__(self) -> str:
        self.begun += 1
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        self.ended.set()
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def caller() -> Request:
    """Return the request of a caller that stays."""

    async def receive() -> dict[str, str]:
        await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    return Request({"type": "http", "method": "POST", "path": "/", "headers": []}, receive)


async def leave(runs: JoinedRuns, body: str, work: Work) -> None:
    """Begin work and run out of patience."""
    with pytest.raises(StillRunning):
        await runs.answer(body, work, 0.05, caller())


@pytest.mark.parametrize("where", [0, 1], ids=["same process", "other process"])
async def test_the_same_body_joins_the_run_that_was_left_behind_once(pair: tuple[JoinedRuns, JoinedRuns], where: int) -> None:
    first, again, other = Work("first"), Work("again"), Work("other")
    body = f"once-{where}"
    await leave(pair[0], body, first)
    waiting = asyncio.create_task(pair[where].answer(body, again, 30, caller()))
    first.go.set()
    assert await waiting == "first" and again.begun == 0
    # A further call with the same body has a run of its own
    other.go.set()
    assert await pair[where].answer(body, other, 30, caller()) == "other"


async def test_a_run_that_ended_after_it_was_left_behind_can_still_be_joined(pair: tuple[JoinedRuns, JoinedRuns]) -> None:
    first, again = Work("first"), Work("again")
    await leave(pair[0], "late", first)
    first.go.set()
    assert await pair[1].answer("late", again, 30, caller()) == "first" and again.begun == 0


@pytest.mark.parametrize("where", [0, 1], ids=["same process", "other process"])
async def test_nobody_joins_a_run_that_has_failed(pair: tuple[JoinedRuns, JoinedRuns], where: int) -> None:
    body = f"failed-{where}"
    failing, again = Work(InfraFailed("the node was lost")), Work("again")
    await leave(pair[0], body, failing)
    failing.go.set()
    await failing.ended.wait()
    again.go.set()
    assert await pair[where].answer(body, again, 30, caller()) == "again"


async def test_a_run_that_nobody_joins_is_cancelled(pair: tuple[JoinedRuns, JoinedRuns], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined, "ABANDONED_S", 0.05)
    work = Work("never")
    await leave(pair[0], "forgotten", work)
    await asyncio.wait_for(work.cancelled.wait(), 10)
