"""Runs that are left behind by their callers, and who joins them; two of `JoinedRuns` stand for two processes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

pytest.importorskip("fastapi", reason="the extra `gateway` is not installed")

from redis.asyncio import Redis
from starlette.requests import Request

from app.gateway import joined
from app.gateway.errors import InfraFailed, StillRunning
from app.gateway.joined import JoinedRuns


@pytest.fixture
async def pair(empty_store: Redis) -> AsyncIterator[tuple[JoinedRuns, JoinedRuns]]:
    runs = JoinedRuns(empty_store), JoinedRuns(empty_store)
    yield runs
    for each in runs:
        await each.close()


@pytest.fixture(autouse=True)
def lives_long(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a process count as alive on a busy machine, too, but in the tests that are of time."""
    if not request.node.get_closest_marker("real"):
        monkeypatch.setattr(joined, "ALIVE_S", 60.0)


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


async def test_a_caller_that_comes_again_before_the_store_knows_that_it_was_gone_joins_its_run(empty_store: Redis) -> None:
    # Given a store that is slow to write down what is abandoned
    asked, known = asyncio.Event(), asyncio.Event()

    class Slow(Redis):
        async def set(self, *args: object, **options: object) -> object:
            asked.set()
            await known.wait()
            return await super().set(*args, **options)

    slow = Slow(connection_pool=empty_store.connection_pool)
    runs, first, again = JoinedRuns(slow), Work("first"), Work("again")
    left = asyncio.create_task(leave(runs, "soon", first))
    # When a caller is out of patience, and comes again at once
    await asyncio.wait_for(asked.wait(), 60)
    waiting = asyncio.create_task(runs.answer("soon", again, 30, caller()))
    await asyncio.sleep(0.05)
    known.set()
    await left
    first.go.set()
    assert await waiting == "first" and again.begun == 0
    await runs.close()


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


async def test_nobody_waits_for_a_run_whose_process_has_died(pair: tuple[JoinedRuns, JoinedRuns], empty_store: Redis) -> None:
    # Given a run that was left behind by its caller and then by its process: nobody writes of it any more
    await empty_store.zadd("tangram-gw-abandoned-orphan", {"0123456789abcdef": time.time()})
    again = Work("again")
    again.go.set()
    assert await pair[1].answer("orphan", again, 10, caller()) == "again"


@pytest.mark.real
async def test_a_run_that_takes_long_is_joined_all_the_while(pair: tuple[JoinedRuns, JoinedRuns]) -> None:
    first, again = Work("first"), Work("again")
    await leave(pair[0], "long", first)
    with pytest.raises(StillRunning):
        await pair[1].answer("long", again, joined.ALIVE_S + 2.0, caller())
    first.go.set()
    assert await pair[1].answer("long", again, 30, caller()) == "first" and again.begun == 0


async def test_a_run_that_nobody_joins_is_cancelled(pair: tuple[JoinedRuns, JoinedRuns], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined, "ABANDONED_S", 0.05)
    work = Work("never")
    await leave(pair[0], "forgotten", work)
    await asyncio.wait_for(work.cancelled.wait(), 60)


@pytest.mark.real
async def test_a_run_that_is_joined_and_left_again_is_kept_for_as_long_again(
    pair: tuple[JoinedRuns, JoinedRuns], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joined, "ABANDONED_S", 4.0)
    work, again = Work("never"), Work("again")
    await leave(pair[0], "left twice", work)
    joined_at = time.monotonic()
    with pytest.raises(StillRunning):
        await pair[1].answer("left twice", again, 0.5, caller())
    await asyncio.wait_for(work.cancelled.wait(), 60)
    # It was left again no sooner than half a second after it was joined
    assert time.monotonic() - joined_at > 0.5 + 3.9 and again.begun == 0
