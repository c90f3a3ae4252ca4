"""The Celery task of an API node: `api.call`, one HTTP request that a quota allows.

The quota was granted by the scheduler before the request came here; nothing is retried or delayed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx

from app.action_task import PayloadTask
from app.celery import app
from tangram.errors import ActionFailed, ActionTimedOut
from workers.context import ApiContext, context
from workers.control import this_node


@app.task(name="api.call", base=PayloadTask, bind=True)  # type: ignore[untyped-decorator]
def call(
    self: PayloadTask, quota: str, method: str, url: str, headers: Mapping[str, str] | None = None, body: Any = None
) -> dict[str, Any]:
    """Send a request and return the answer, whatever its status code."""
    timeout_s = this_node().call(self.request.id).header.get("timeout_s") or api().settings.timeout_s
    content = api().blobs.get(body) if body is not None else None
    try:
        with api().http.stream(method, url, headers=dict(headers or {}), content=content, timeout=timeout_s) as answer:
            received, truncated = _capped(answer, api().settings.output_limit_bytes)
    except httpx.TimeoutException:
        raise ActionTimedOut(f"{method} {url}: no answer within {timeout_s:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ActionFailed(f"{method} {url}: {error}") from None
    return {
        "status_code": answer.status_code,
        "headers": dict(answer.headers),
        "body": api().blobs.put(received),
        "truncated": truncated,
    }


def _capped(answer: httpx.Response, limit: int) -> tuple[bytes, bool]:
    received = bytearray()
    for chunk in answer.iter_bytes():
        received += chunk
        if len(received) > limit:
            return bytes(received[:limit]), True
    return bytes(received), False


def api() -> ApiContext:
    """Return what the worker set up for this task."""
    return context(ApiContext)
