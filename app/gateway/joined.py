"""Requests without an idempotency key whose callers come again: the same body, sent again, waits for what was begun.

| a call | then |
|---|---|
| gets its answer in time | nothing is kept |
| is out of patience, or its connection breaks | its run goes on, *abandoned*, and can be joined for `ABANDONED_S` |
| has the body of an abandoned run | it joins that run, in whatever process this is; only one call joins |
| has the body of a run whose caller still waits | a run of its own: the two may be different requests that look alike |

Nobody joins a run that has failed, or whose process has died. A run that nobody joins in time is cancelled.

| key | holds |
|---|---|
| `tangram-gw-abandoned-<digest>` | sorted set: ids of the abandoned runs of a body, by the time since when each is |
| `tangram-gw-running-<run>` | there while the process of an abandoned run lives and the run goes on; expires after `ALIVE_S` |
| `tangram-gw-answer-<run>` | the answer of a run that was abandoned once, for another process; empty where it failed |
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field

from redis import RedisError
from redis.asyncio import Redis
from starlette.requests import Request

from app.gateway.calls import disconnected, noted_actions
from app.gateway.errors import Cancelled, StillRunning

ABANDONED_S = 90
"""Seconds for which an abandoned run waits for its caller; the slowest of them comes again within a minute."""

ALIVE_S = 5.0
"""Seconds without a sign of life after which the process of an abandoned run counts as dead, and its callers get a run of their own."""

_ANSWER_S = 2 * ABANDONED_S
_BEATS = 5
_POLL_S = 0.2
_log = logging.getLogger(__name__)
_ABANDONED = "tangram-gw-abandoned-"
_RUNNING = "tangram-gw-running-"
_ANSWER = "tangram-gw-answer-"


@dataclass(eq=False)
class _Run:
    """What was begun for a body; `actions` are the ids of its actions so far."""

    body: str
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    actions: list[str] = field(default_factory=list)
    was_abandoned: bool = False
    task: asyncio.Task[str] = field(init=False)


class JoinedRuns:
    """The runs of one process; used by one event loop."""

    def __init__(self, store: Redis) -> None:
        """Share what was abandoned through `store`."""
        self._store = store
        self._runs: dict[str, _Run] = {}
        self._watching: set[asyncio.Task[None]] = set()
        self._abandoning: dict[asyncio.Task[None], str] = {}
        """Tasks that write an abandoned run to the store, with the body of the run."""

    async def answer(self, body: str, begin: Callable[[], Coroutine[object, object, str]], patience_s: float, request: Request) -> str:
        """Return the answer for a `body`, given as a digest of everything that makes it: that of an abandoned run, or of a new one.

        Raises `StillRunning` when there is none within `patience_s`; `Cancelled` when the caller's connection breaks; `GatewayError` as
        `begin` does.
        """
        deadline = time.monotonic() + patience_s
        if pending := [task for task, abandoned in self._abandoning.items() if abandoned == body]:
            await asyncio.wait(pending)  # the caller came again sooner than the store knew that it had gone
        joined = await self._store.zpopmin(_ABANDONED + body)
        if joined:
            member = joined[0][0]
            run_id = member.decode() if isinstance(member, bytes) else str(member)
            run = self._runs.get(run_id)
            if run is not None:
                return await self._wait(run, deadline, request)
            stored = await self._elsewhere(body, run_id, deadline, request)
            if stored:
                return stored
        run = _Run(body)
        token = noted_actions.set(run.actions)
        try:
            run.task = asyncio.create_task(begin())
        finally:
            noted_actions.reset(token)
        self._runs[run.id] = run
        run.task.add_done_callback(lambda _: self._end(run))
        return await self._wait(run, deadline, request)

    async def close(self) -> None:
        """Cancel what still runs."""
        tasks = [run.task for run in self._runs.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._watching, return_exceptions=True)

    async def _wait(self, run: _Run, deadline: float, request: Request) -> str:
        gone = asyncio.ensure_future(disconnected(request))
        try:
            await asyncio.wait([run.task, gone], timeout=max(0.0, deadline - time.monotonic()), return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            noted = noted_actions.get()
            if noted is not None:
                noted.extend(run.actions)
            if not run.task.done():
                is_watched, run.was_abandoned = run.was_abandoned, True
                abandoning = asyncio.ensure_future(self._abandon(run))
                self._abandoning[abandoning] = run.body
                abandoning.add_done_callback(self._abandoning.pop)
                await asyncio.shield(abandoning)
                if not is_watched:
                    self._keep(self._cancel_unless_joined(run))
        if run.task.done():
            return run.task.result()
        raise self._no_answer(gone)

    async def _elsewhere(self, body: str, run_id: str, deadline: float, request: Request) -> str:
        """Wait for the answer of a run of another process; return nothing where it has failed, or its process has died."""
        gone = asyncio.ensure_future(disconnected(request))
        try:
            while time.monotonic() < deadline and not gone.done():
                raw, running = await self._store.mget(_ANSWER + run_id, _RUNNING + run_id)
                if raw is not None:
                    return raw.decode() if isinstance(raw, bytes) else str(raw)
                if running is None:
                    return ""
                await asyncio.wait([gone], timeout=_POLL_S)
            await self._note_abandoned(body, run_id)
            raise self._no_answer(gone)
        finally:
            gone.cancel()

    def _no_answer(self, gone: asyncio.Future[None]) -> StillRunning | Cancelled:
        if gone.done() and not gone.cancelled():
            return Cancelled("the caller is gone")
        return StillRunning("there is no result yet: the same request, sent again, waits for it")

    async def _abandon(self, run: _Run) -> None:
        """Have other processes know of a run of this one, and that it goes on."""
        await self._beat(run)
        await self._note_abandoned(run.body, run.id)

    async def _beat(self, run: _Run) -> None:
        await self._store.set(_RUNNING + run.id, "1", px=round(ALIVE_S * 1000))

    async def _note_abandoned(self, body: str, run_id: str) -> None:
        async with self._store.pipeline() as pipe:
            pipe.zadd(_ABANDONED + body, {run_id: time.time()})
            pipe.expire(_ABANDONED + body, _ANSWER_S)
            await pipe.execute()

    async def _cancel_unless_joined(self, run: _Run) -> None:
        """Cancel a run once nobody has joined it for `ABANDONED_S`; who joins it and leaves it again begins that anew.

        Until then, show that this process lives.
        """
        left_s = float(ABANDONED_S)
        while True:
            await self._beat_until_done(run, left_s)
            if run.task.done():
                return
            since = await self._store.zscore(_ABANDONED + run.body, run.id)
            left_s = ABANDONED_S if since is None else since + ABANDONED_S - time.time()
            if left_s <= 0 and await self._store.zrem(_ABANDONED + run.body, run.id):
                run.task.cancel()
                return

    async def _beat_until_done(self, run: _Run, for_s: float) -> None:
        """Wait for the end of a run for so many seconds, and show meanwhile that this process lives."""
        over_at = time.monotonic() + for_s
        while not run.task.done() and (left_s := over_at - time.monotonic()) > 0:
            with suppress(RedisError):  # the next beat comes before the last one is over
                await self._beat(run)
            await asyncio.wait([run.task], timeout=min(left_s, ALIVE_S / _BEATS))

    def _end(self, run: _Run) -> None:
        del self._runs[run.id]
        failed = run.task.cancelled() or run.task.exception() is not None
        if run.was_abandoned:
            self._keep(self._share(run.id, "" if failed else run.task.result()))

    async def _share(self, run_id: str, answer: str) -> None:
        await self._store.set(_ANSWER + run_id, answer, ex=_ANSWER_S)

    def _keep(self, doing: Awaitable[None]) -> None:
        """Do something beside the calls. Without the store, what was abandoned is not joined: its caller gets a run of its own."""

        async def do() -> None:
            try:
                await doing
            except RedisError as error:
                _log.warning("a run that its caller has left cannot be shared: %s", error)

        task = asyncio.create_task(do())
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)
