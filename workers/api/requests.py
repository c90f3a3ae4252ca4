"""HTTP requests with a hard deadline, which can be called off: one event loop for all of a worker's calls.

What may be repeated, idempotent requests only, is repeated here when the connection broke or the answer was 502, 503 or
504 without `Retry-After`: such things pass within a second or not at all. So waits are short, at most two, inside the
action's timeout, and hold the place of the quota meanwhile; the scheduler is told how many requests there were and
charges them to the account. Whoever is to wait for longer, because the server says so, waits in the scheduler's queue and
holds nothing (`scheduler/answers.py`).

A timeout of a blocking client holds for each read by itself, so that a server which sends a byte now and then is
never too late; and a blocked thread cannot be called off. Here a call is a coroutine under one timeout.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace

import anyio
import httpx
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, retry_if_result, stop_after_attempt, wait_random

_KEPT_ALIVE = 64

MOST_SENT = 3
"""Requests of one try of an action: the first and two repeats."""

_WAIT_S = (0.1, 0.5)
_PASSING = (502, 503, 504)
_BROKEN = (httpx.NetworkError, httpx.RemoteProtocolError)

_GOES_OUT = ".send_request_headers.started"
"""How httpcore's event of that ends, whichever version of HTTP it is."""

LONGEST_LEAD_S = 0.5
"""Longest wait for a request's time: more than any scheduler grants ahead means that its clock is not ours."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A server's answer; `body` holds at most the limit, and `truncated` says whether there was more.

    The keys of `headers` are in lower case. `requests` were sent until it came, `execution_s` seconds after the first.
    """

    status_code: int
    headers: Mapping[str, str]
    body: bytes
    truncated: bool
    requests: int = 1
    execution_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A request: it goes out at `not_before`, an epoch time, or at once, and is repeated only if it is `idempotent`."""

    method: str
    url: str
    headers: Mapping[str, str]
    content: bytes | None
    timeout_s: float
    limit: int
    idempotent: bool = False
    not_before: float = 0.0


class Requests:
    """Sends requests; for use by many threads."""

    def __init__(self) -> None:
        """Start the loop's thread."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tangram-requests", daemon=True)
        self._thread.start()
        # What httpx imports with its first request would make that one late by more than quotas allow for.
        asyncio.run_coroutine_threadsafe(anyio.sleep(0), self._loop).result()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=_KEPT_ALIVE)
        self._http = httpx.AsyncClient(limits=limits, follow_redirects=False, timeout=None)

    def send(self, outgoing: Outgoing, on_sent: Callable[[], None] = lambda: None) -> Future[Answer]:
        """Begin a request; the future ends with the answer, with what httpx raises, or with `TimeoutError` after its `timeout_s`.

        At most `limit` bytes of the body are read. Cancelling the future closes the connection. `on_sent` is called in the
        loop's thread when the first request goes out, its connection made.
        """
        return asyncio.run_coroutine_threadsafe(self._send(outgoing, on_sent), self._loop)

    async def _send(self, outgoing: Outgoing, on_sent: Callable[[], None]) -> Answer:
        early_s = min(outgoing.not_before - time.time(), LONGEST_LEAD_S)
        if early_s > 0:
            await asyncio.sleep(early_s)
        began, sent, told = time.perf_counter(), 0, False

        async def trace(event: str, info: object) -> None:
            nonlocal told
            if not told and event.endswith(_GOES_OUT):
                told = True
                on_sent()

        async def once() -> Answer:
            nonlocal sent
            sent += 1
            return await self._once(outgoing, trace)

        async with asyncio.timeout(outgoing.timeout_s):
            answer: Answer = await _retrying(outgoing)(once)
        return replace(answer, requests=sent, execution_s=time.perf_counter() - began)

    async def _once(self, outgoing: Outgoing, trace: Callable[[str, object], Awaitable[None]]) -> Answer:
        stream = self._http.stream(
            outgoing.method, outgoing.url, headers=outgoing.headers, content=outgoing.content, extensions={"trace": trace}
        )
        async with stream as answer:
            received = bytearray()
            async for chunk in answer.aiter_bytes():
                received += chunk
                if len(received) > outgoing.limit:
                    break
            return Answer(answer.status_code, dict(answer.headers), bytes(received[: outgoing.limit]), len(received) > outgoing.limit)

    def close(self) -> None:
        """Give up what goes on and end the thread."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(5.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)

    async def _end(self) -> None:
        going = asyncio.all_tasks() - {asyncio.current_task()}
        for task in going:
            task.cancel()
        await asyncio.gather(*going, return_exceptions=True)
        await self._http.aclose()


def _retrying(outgoing: Outgoing) -> AsyncRetrying:
    """Return what decides whether a request is sent once more; the last answer or error is the caller's."""
    return AsyncRetrying(
        retry=retry_if_exception_type(_BROKEN) | retry_if_result(_passing),
        stop=stop_after_attempt(MOST_SENT if outgoing.idempotent else 1),
        wait=wait_random(*_WAIT_S),
        retry_error_callback=_last,
    )


def _passing(answer: Answer) -> bool:
    return answer.status_code in _PASSING and "retry-after" not in answer.headers


def _last(state: RetryCallState) -> Answer:
    assert state.outcome is not None, "it is called after a try"
    answer: Answer = state.outcome.result()
    return answer
