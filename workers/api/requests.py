"""HTTP requests with a hard deadline, which can be called off: one event loop for all of a worker's calls.

A timeout of a blocking client holds for each read by itself, so that a server which sends a byte now and then is
never too late; and a blocked thread cannot be called off. Here a call is a coroutine under one timeout.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass

import httpx

_KEPT_ALIVE = 64


@dataclass(frozen=True, slots=True)
class Answer:
    """A server's answer; `body` holds at most the limit, and `truncated` says whether there was more."""

    status_code: int
    headers: Mapping[str, str]
    body: bytes
    truncated: bool


class Requests:
    """Sends requests; for use by many threads."""

    def __init__(self) -> None:
        """Start the loop's thread."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tangram-requests", daemon=True)
        self._thread.start()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=_KEPT_ALIVE)
        self._http = httpx.AsyncClient(limits=limits, follow_redirects=False, timeout=None)

    def send(
        self, method: str, url: str, headers: Mapping[str, str], content: bytes | None, *, timeout_s: float, limit: int
    ) -> Future[Answer]:
        """Begin a request; the future ends with the answer, or with what httpx raises, or with `TimeoutError` after `timeout_s`.

        At most `limit` bytes of the body are read. Cancelling the future closes the connection.
        """
        return asyncio.run_coroutine_threadsafe(self._send(method, url, headers, content, timeout_s, limit), self._loop)

    async def _send(self, method: str, url: str, headers: Mapping[str, str], content: bytes | None, timeout_s: float, limit: int) -> Answer:
        async with asyncio.timeout(timeout_s), self._http.stream(method, url, headers=headers, content=content) as answer:
            received = bytearray()
            async for chunk in answer.aiter_bytes():
                received += chunk
                if len(received) > limit:
                    break
            return Answer(answer.status_code, dict(answer.headers), bytes(received[:limit]), len(received) > limit)

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
