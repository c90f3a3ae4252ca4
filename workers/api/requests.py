"""Requests to outside APIs, each with a hard deadline; they can be called off.

An idempotent request is repeated here when its connection broke, or when the answer was 502, 503 or 504 without `Retry-After`.
Such failures pass within a second or not at all. There are two repeats at most, within the action's timeout, and the action keeps its
place in the quota meanwhile. The number of requests that went out is reported with the end, and the scheduler charges them to the account.
An action that the server asks to wait for longer waits in the scheduler's queue and holds nothing (`scheduler/quotas/answers.py`).
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

import anyio
import httpx
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, retry_if_result, stop_after_attempt, wait_random

from app.hosts import Hosts
from tangram import clock
from workers.api.connections import NamedHosts
from workers.http import HttpLoop, Pending

MOST_SENT = 3
"""Requests of one try of an action: the first and two repeats."""

MOST_PARTS = 50_000
"""The most parts in which the body of an answer is read; each takes some 50 us."""

_BESIDE_BODY_BYTES = 2 << 20
"""The most that comes beside the body of an answer: its head, the lengths of its parts, what is read ahead."""

_WAIT_S = (0.1, 0.5)
_PASSING = (502, 503, 504)
_BROKEN = (httpx.NetworkError, httpx.RemoteProtocolError)

_GZIP = 16 + zlib.MAX_WBITS

_GOES_OUT = ".send_request_headers.started"
"""End of the name of httpcore's event when a request goes out, whichever version of HTTP it is."""

LONGEST_LEAD_S = 0.5
"""Longest wait for `not_before`. No scheduler grants further ahead, so a longer wait means that its clock differs from ours.
`QUOTA_LEAD_S` of `app/scheduler_process.py` must stay below it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A server's answer; `body` holds at most the limit, and `truncated` says whether there was more.

    A body that is packed as gzip, once, has been unpacked; one that is packed otherwise is as it came.
    The keys of `headers` are in lower case. `requests` went out until it came, `execution_s` seconds after the first was begun.
    """

    status_code: int
    headers: Mapping[str, str]
    body: bytes
    truncated: bool
    requests: int = 1
    execution_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A request.

    It goes out at `not_before`, an epoch time, or at once, to a host among `hosts`; at most `limit` bytes of the answer's body are
    read. It is repeated only if it is `idempotent`.
    """

    method: str
    url: str
    headers: Mapping[str, str]
    content: bytes | None
    timeout_s: float
    limit: int
    hosts: Hosts
    idempotent: bool = False
    not_before: float = 0.0


class Requests:
    """Sends requests. Safe for many threads."""

    def __init__(self) -> None:
        # At INFO and below, these log addresses with their queries, and headers: places for secrets.
        for library in ("httpx", "httpcore"):
            logging.getLogger(library).setLevel(logging.WARNING)
        self._loop = HttpLoop("tangram-requests")
        self._tls = httpx.create_ssl_context()
        # A client per set of hosts: a connection that is kept may serve none that must not reach its host.
        self._clients: dict[tuple[Hosts, int], httpx.AsyncClient] = {}
        # What anyio imports on its first use would make the first request later than quotas allow for.
        self._loop.submit(lambda: anyio.sleep(0)).result()

    def send(self, outgoing: Outgoing, on_sent: Callable[[int], None] = lambda sent: None) -> Pending[Answer]:
        """Begin a request.

        Its result is the answer. It raises what httpx raises, `HostRefused`, or `TimeoutError` after `timeout_s`. `on_sent` is
        called in the loop's thread whenever a request goes out, its connection made, with how many have by then.
        """
        return self._loop.submit(lambda: self._send(outgoing, on_sent))

    def close(self) -> None:
        """Call off all requests and end the thread."""
        self._loop.close()

    def _client(self, hosts: Hosts, limit: int) -> httpx.AsyncClient:
        if (hosts, limit) not in self._clients:
            self._clients[hosts, limit] = self._loop.client(NamedHosts(hosts, self._tls, 2 * limit + _BESIDE_BODY_BYTES))
        return self._clients[hosts, limit]

    async def _send(self, outgoing: Outgoing, on_sent: Callable[[int], None]) -> Answer:
        early_s = min(outgoing.not_before - clock.time(), LONGEST_LEAD_S)
        if early_s > 0:
            await asyncio.sleep(early_s)
        began, sent = clock.monotonic(), 0

        async def trace(event: str, info: object) -> None:
            nonlocal sent
            if event.endswith(_GOES_OUT):
                sent += 1
                on_sent(sent)

        try:
            with anyio.fail_after(outgoing.timeout_s):
                answer: Answer = await _retrying(outgoing)(self._once, outgoing, trace)
        except zlib.error as error:
            raise httpx.DecodingError(f"the answer is no gzip data: {error}") from error
        return replace(answer, requests=sent, execution_s=clock.monotonic() - began)

    async def _once(self, outgoing: Outgoing, trace: Callable[[str, object], Awaitable[None]]) -> Answer:
        stream = self._client(outgoing.hosts, outgoing.limit).stream(
            outgoing.method, outgoing.url, headers=outgoing.headers, content=outgoing.content, extensions={"trace": trace}
        )
        async with stream as answer:
            body, most, is_cut, parts = bytearray(), outgoing.limit + 1, False, 0
            # httpx itself unpacks a whole part, as often as the answer says.
            unpacker = zlib.decompressobj(_GZIP) if answer.headers.get("content-encoding", "").lower() == "gzip" else None
            async for part in answer.aiter_raw():
                body += unpacker.decompress(part, most - len(body)) if unpacker is not None else part
                parts += 1
                # What is packed is seldom larger than what it becomes.
                if is_cut := len(body) >= most or answer.num_bytes_downloaded > 2 * most or parts > MOST_PARTS:
                    break
            return Answer(answer.status_code, dict(answer.headers), bytes(body[: outgoing.limit]), is_cut)


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
