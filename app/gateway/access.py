"""What every call passes through: a limit on its body, and a line in the access log with the ids of its actions.

Plain ASGI, so that neither streamed answers nor the news of a broken connection are held up.
"""

from __future__ import annotations

import logging
import time

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.gateway.calls import noted_actions
from app.gateway.errors import TooLarge
from app.gateway.shape import plain_answer

access_log = logging.getLogger("app.gateway.access")


class Access:
    """Middleware that logs and limits calls."""

    def __init__(self, app: ASGIApp, body_limit_bytes: int) -> None:
        self._app = app
        self._limit = body_limit_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status, answered, got = time.monotonic(), 0, False, 0
        request = Request(scope)
        actions: list[str] = []
        token = noted_actions.set(actions)
        too_large = TooLarge(f"the body is larger than {self._limit} bytes (TANGRAM_GATEWAY_BODY_MB)")

        async def limited() -> Message:
            nonlocal got
            message = await receive()
            got += len(message.get("body", b"")) if message["type"] == "http.request" else 0
            if got > self._limit:
                await _drain(receive, message, self._limit)
                raise too_large
            return message

        async def noted(message: Message) -> None:
            nonlocal status, answered
            if message["type"] == "http.response.start":
                status, answered = message["status"], True
            await send(message)

        try:
            length = request.headers.get("content-length", "0")
            if length.isdigit() and int(length) > self._limit:
                await _drain(receive, {"type": "http.request", "more_body": True}, 2 * self._limit)
                raise too_large
            await self._app(scope, limited, noted)
        except TooLarge as error:
            if answered:
                raise
            await plain_answer(request, error)(scope, receive, noted)
        finally:
            noted_actions.reset(token)
            job = getattr(request.state, "job", "-")
            seconds = time.monotonic() - began
            path = scope["raw_path"].decode("latin-1")  # percent-encoded, so that nobody can write lines of his own into the log
            access_log.info("%s %s %d %.3f s %s %s", scope["method"], path, status, seconds, job, ",".join(actions) or "-")


async def _drain(receive: Receive, message: Message, most: int) -> None:
    """Read at most `most` bytes of what is left of a body, since a client that is still sending does not see the answer."""
    while message["type"] == "http.request" and message.get("more_body") and most > 0:
        message = await receive()
        most -= len(message.get("body", b""))
