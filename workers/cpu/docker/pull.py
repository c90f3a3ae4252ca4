"""One pull of an image: a request to the engine that can be ended at any moment, and ends by itself at its deadline.

The engine ends a pull when the connection that asked for it is closed. The docker SDK cannot close one that waits for an answer, so
the request is made with httpx, in a thread with an event loop of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import httpx

from workers.cpu.errors import ImageMissing

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PullRequest:
    """A request to the engine at `url`, over the Unix socket `socket` where there is one. The engine may be silent for `stall_s`."""

    url: str
    socket: str | None
    params: Mapping[str, str]
    headers: Mapping[str, str]
    stall_s: float


class Pull:
    """A pull of the image `reference` that has begun.

    `done` resolves when the image is here, or fails with `ImageMissing`. A pull fails when the registry refuses it, when nothing comes
    for `stall_s` seconds, and when it takes longer than `limit_s` seconds in all. `progress` gets bytes done and in all.
    """

    def __init__(self, reference: str, request: PullRequest, limit_s: float, progress: Progress) -> None:
        self._reference, self._request, self._limit_s, self._progress = reference, request, limit_s, progress
        self.done: Future[None] = Future()
        self.waiters = 0
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self._fetch())
        self._thread = threading.Thread(target=self._run, name="tangram-pull", daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        """End it, and return once it has ended."""
        # The loop is closed where it has ended by itself.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError, Exception):
            self._loop.run_until_complete(self._task)
        self._loop.close()
        problem = "nobody waits for it any more" if self._task.cancelled() else _said(self._task.exception(), self._request, self._limit_s)
        if problem:
            self.done.set_exception(ImageMissing(f"image {self._reference!r} cannot be had: {problem}"))
        else:
            self.done.set_result(None)

    async def _fetch(self) -> None:
        layers: dict[str, tuple[int, int]] = {}
        request = self._request
        transport = httpx.AsyncHTTPTransport(uds=request.socket, verify=False)  # a Unix socket has no certificates
        async with (
            asyncio.timeout(self._limit_s),
            httpx.AsyncClient(transport=transport, timeout=request.stall_s) as client,
            client.stream("POST", request.url, params=request.params, headers=request.headers) as answer,
        ):
            if answer.is_error:
                raise ImageMissing(_message(await answer.aread()))
            async for text in answer.aiter_lines():
                line: dict[str, Any] = json.loads(text) if text.strip() else {}
                # Version 1.48 of the engine's interface announces that `error` will be left out.
                if problem := (line.get("errorDetail") or {}).get("message") or line.get("error"):
                    raise ImageMissing(problem)
                detail = line.get("progressDetail") or {}
                if line.get("status") == "Downloading" and "total" in detail:
                    layers[line["id"]] = (int(detail.get("current", 0)), int(detail["total"]))
                    self._progress(sum(done for done, _ in layers.values()), sum(total for _, total in layers.values()))


def _said(error: BaseException | None, request: PullRequest, limit_s: float) -> str:
    """Return what has gone wrong, in one line; nothing where nothing has."""
    if error is None:
        return ""
    if isinstance(error, httpx.TimeoutException):
        return f"nothing more of it came for {request.stall_s:g} s"
    if isinstance(error, TimeoutError):
        return f"it was not here after {limit_s:g} s"
    return " ".join(str(error).split()) or type(error).__name__


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")
