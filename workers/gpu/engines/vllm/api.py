"""HTTP to one vLLM server. A request ends when the answer comes, the call is cancelled, or the server is gone.

| the server answers | the request ends with |
|---|---|
| 2xx | the answer |
| 503, and it is well | further tries, as long as the caller has time: it is overloaded |
| 4xx | `Refused`, never repeated |
| another 5xx, and it is well | `Refused` |
| 5xx, and it is not well | `Gone` |
| nothing, and `/health` is 5xx, or silent for `SILENT_S` | `Gone` |
| by breaking the connection | a second try on a fresh one, since an idle connection may close at any time; then `Gone` |

Every request made here may be repeated. A cancelled request closes its connection, and vLLM then drops the request.
"""

from __future__ import annotations

import json
from concurrent.futures import CancelledError
from concurrent.futures import wait as wait_for
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import httpx

from workers.gpu.call_control import CallControl
from workers.http import HttpLoop, LoopClosed

_CANCEL_POLL_S = 0.05
_PAUSE_S = 0.1
_KEPT_S = 2.0
_KEPT = 8
_WELL_S = 5.0
_WATCH_S = 1.0
_CLOSED = "its connection is closed"

SILENT_S = 20.0
"""Seconds for which `/health` may be silent while an answer is due. Another thread than the computing one answers it."""


class Refused(RuntimeError):
    """Raised when the server answers that it will not; `status` is the HTTP status."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"the server answers {status}: {said}")
        self.status = status


class Gone(ConnectionError):
    """Raised when there is no server behind the socket any more."""


class Api:
    """One server's HTTP interface, on a loop of its own. Safe for many threads."""

    def __init__(self, socket: Path) -> None:
        self._loop = HttpLoop("tangram-vllm-http")
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=_KEPT, keepalive_expiry=_KEPT_S)
        # Nothing is verified on a Unix socket, so no certificates need be read.
        self._http = self._loop.client(httpx.AsyncHTTPTransport(uds=str(socket), limits=limits, verify=False), "http://vllm")

    def ask(
        self, method: str, path: str, body: object = None, *, timeout_s: float | None = None, control: CallControl | None = None
    ) -> Any:
        """Send one request and return the JSON it is answered with.

        Raises `Refused`, `Gone`, `TimeoutError` after `timeout_s`, `CallCancelled`.
        """
        return self.ask_all([(method, path, body)], 1, timeout_s=timeout_s, control=control)[0]

    def ask_all(
        self,
        requests: list[tuple[str, str, object]],
        at_once: int,
        *,
        timeout_s: float | None = None,
        control: CallControl | None = None,
    ) -> list[Any]:
        """Send requests of method, path and body, `at_once` at a time; the answers come in their order. Raises as `ask` does."""
        control = control or CallControl()
        control.check()
        try:
            pending = self._loop.submit(lambda: self._all(requests, at_once, timeout_s))
        except LoopClosed:
            raise Gone(_CLOSED) from None
        try:
            while not wait_for([pending.future], _CANCEL_POLL_S).done:
                control.check()
                if self._loop.closed:
                    raise Gone(_CLOSED)
            return pending.result()
        except (CancelledError, RuntimeError) as error:
            # A request that is under way as its connection is closed ends with any of several errors.
            if self._loop.closed or isinstance(error, CancelledError):
                raise Gone(_CLOSED) from None
            raise
        finally:
            pending.cancel()

    def close(self) -> None:
        """Call off all requests and end the loop's thread; idempotent."""
        self._loop.close()

    async def _all(self, requests: list[tuple[str, str, object]], at_once: int, timeout_s: float | None) -> list[Any]:
        places = anyio.Semaphore(at_once)
        answers: dict[int, Any] = {}

        async def one(index: int, method: str, path: str, body: object) -> None:
            async with places:
                answers[index] = await self._one(method, path, body)

        try:
            with anyio.fail_after(timeout_s):
                async with anyio.create_task_group() as watched:
                    watched.start_soon(self._watch)
                    async with anyio.create_task_group() as asking:
                        for index, request in enumerate(requests):
                            asking.start_soon(one, index, *request)
                    watched.cancel_scope.cancel()
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        except TimeoutError:
            raise TimeoutError(f"no answer to {requests[0][1]} within {timeout_s:g} s") from None
        return [answers[index] for index in range(len(requests))]

    async def _one(self, method: str, path: str, body: object) -> Any:
        broken = 0
        while True:
            try:
                answer = await self._http.request(method, path, json=body)
            except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
                broken += 1
                if broken > 1:
                    raise Gone(f"{type(error).__name__}: {error}") from None
                continue
            if answer.is_success:
                return _read(answer)
            if answer.status_code >= 500 and not await self._well():
                raise Gone(f"it answers {answer.status_code} and is not well")
            if answer.status_code == 503:
                await anyio.sleep(_PAUSE_S)
                continue
            raise Refused(answer.status_code, _said(answer))

    async def _watch(self) -> None:
        """Ask for the server's health now and then. Raises `Gone` if it is not well, or silent for `SILENT_S`.

        A server whose computing process has died still listens, but may answer nothing, not even this.
        """
        heard = anyio.current_time()
        while True:
            await anyio.sleep(min(_WATCH_S, SILENT_S))
            with suppress(httpx.HTTPError):
                status = (await self._http.get("/health", timeout=min(_WELL_S, SILENT_S))).status_code
                heard = anyio.current_time()
                if status >= 500:
                    raise Gone(f"it does not answer and says that it is not well ({status})")
            if anyio.current_time() - heard > SILENT_S:
                raise Gone(f"it does not answer and has not said for {SILENT_S:g} s how it is")

    async def _well(self) -> bool:
        try:
            return (await self._http.get("/health", timeout=_WELL_S)).is_success
        except httpx.HTTPError:
            return False


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error that had everything else cancelled; the groups only wrap it."""
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


def _read(answer: httpx.Response) -> Any:
    """Return the JSON of an answer, None where it is empty. Raises `Refused` where it is something else."""
    try:
        return answer.json() if answer.content else None
    except ValueError:
        raise Refused(answer.status_code, f"no JSON but {answer.text[:100]!r}") from None


def _said(answer: httpx.Response) -> str:
    """Return what the server complains about, in one line."""
    try:
        found = answer.json()
        text = found["error"]["message"] if "error" in found else found.get("detail", found)
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError):
        text = answer.text
    return " ".join(str(text).split())[:250]
