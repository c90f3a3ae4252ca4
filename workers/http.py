"""HTTP from threads: an event loop in a thread of its own, whose requests can be waited for and called off.

A blocked thread cannot be called off, and the timeout of a blocking client holds for each read by itself. So requests are
coroutines here, and a worker's threads wait for them.

Requests are cancelled by scopes of anyio. httpx completes its clean-up under those and under nothing else: a task that is
cancelled through asyncio leaves connections open.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, Generic, TypeVar

import anyio
import httpx

T = TypeVar("T")

log = logging.getLogger(__name__)

_CLOSE_S = 5.0


class LoopClosed(RuntimeError):
    """Raised when a request is made on a loop that has been closed."""


class Pending(Generic[T]):
    """A request that is under way. Safe for many threads."""

    future: Future[T]

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._scope: anyio.CancelScope | None = None
        self._cancelled = False

    def result(self, timeout_s: float | None = None) -> T:
        """Wait for the result. Raises what the request raises, or `concurrent.futures.CancelledError` after `cancel`."""
        return self.future.result(timeout_s)

    def cancel(self) -> None:
        """Call the request off and close its connection; does nothing once it is over."""
        with suppress(RuntimeError):  # the loop may be closed already
            self._loop.call_soon_threadsafe(self.cancel_in_loop)

    def cancel_in_loop(self) -> None:
        """Do as `cancel`, in the loop's thread."""
        self._cancelled = True
        if self._scope is not None:
            self._scope.cancel()

    async def carry_out(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do the work, in the loop's thread, until it ends or is called off."""
        with anyio.CancelScope() as self._scope:
            if self._cancelled:
                self._scope.cancel()
            return await work()
        raise asyncio.CancelledError


class HttpLoop:
    """The loop, and the clients on it. Safe for many threads."""

    def __init__(self, name: str) -> None:
        """Start the thread, which is called `name`."""
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._closed = False
        self._clients: list[httpx.AsyncClient] = []
        self._pending: set[Pending[Any]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def client(self, transport: httpx.AsyncBaseTransport, base_url: str = "") -> httpx.AsyncClient:
        """Make a client for requests of this loop, which closes it.

        It follows no redirects, has no timeouts of its own, and keeps no cookies, which would pass from one job to another.
        """
        cookies = CookieJar(DefaultCookiePolicy(allowed_domains=[]))
        client = httpx.AsyncClient(transport=transport, base_url=base_url, timeout=None, follow_redirects=False, cookies=cookies)
        client.headers["accept-encoding"] = "gzip"
        self._clients.append(client)
        return client

    def submit(self, work: Callable[[], Awaitable[T]]) -> Pending[T]:
        """Have the loop do `work`. Raises `LoopClosed`."""
        with self._lock:
            if self._closed:
                raise LoopClosed("the loop of HTTP requests is closed")
            pending = Pending[T](self._loop)
            pending.future = asyncio.run_coroutine_threadsafe(self._tracked(pending, work), self._loop)
        return pending

    def close(self) -> None:
        """Call off all requests, close the clients and end the thread; idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(_CLOSE_S)
        except TimeoutError:
            log.warning("HTTP requests of %s do not end within %g s and are left", self._thread.name, _CLOSE_S)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    async def _tracked(self, pending: Pending[T], work: Callable[[], Awaitable[T]]) -> T:
        self._pending.add(pending)
        try:
            return await pending.carry_out(work)
        finally:
            self._pending.discard(pending)

    async def _end(self) -> None:
        for pending in self._pending:
            pending.cancel_in_loop()
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)
        for client in self._clients:
            await client.aclose()
