"""The Celery task of an API node: `api.call`, one HTTP request that a quota allows.

The scheduler grants the quota before the task arrives, and the grant names the hosts that the request may reach. What the answer
says of limits and costs goes back to the scheduler with the report of the end. If the API refuses the request and the action may wait,
there is a report and no result (`scheduler/quotas/answers.py`).
"""

from __future__ import annotations

import os
import re
import socket
from concurrent.futures import CancelledError
from typing import Any

import httpx

from app.action_task import PayloadTask
from app.celery import app
from app.hosts import Hosts
from tangram.errors import ActionCancelled, ActionFailed, ActionRefused, ActionTimedOut
from workers.api.connections import HostRefused
from workers.api.limits import refuses, report
from workers.api.requests import Outgoing
from workers.context import ApiContext, context
from workers.control import this_node

_QUOTED = re.compile(r""" b['"].*""")


@app.task(name="api.call", base=PayloadTask, bind=True)  # type: ignore[untyped-decorator]
def call(self: PayloadTask, quota: str, method: str, url: str, headers: Any = None, body: Any = None) -> dict[str, Any]:
    """Send a request and return the answer, whatever its status code.

    An answer that refuses the request (429, 503 with `Retry-After`) is returned only if the action may not wait again.
    """
    here, node = context(ApiContext), this_node()
    action = node.call(self.request.id)
    timeout_s = action.header.get("timeout_s") or here.settings.timeout_s
    content = here.blobs.get(body) if body is not None else None
    outgoing = Outgoing(
        method=method,
        url=url,
        headers=dict(here.blobs.get_json(headers) or {}),
        content=content,
        timeout_s=timeout_s,
        limit=here.settings.output_limit_bytes,
        idempotent=action.header.get("idempotent") is True,
        not_before=action.grant.get("not_before", 0.0),
        hosts=Hosts.named(action.grant.get("hosts", ())),
    )

    def note_sent(requests: int) -> None:
        if requests == 1:
            node.note_sent(action)
        action.answer = {"status": 0, "requests": requests}

    sent = here.requests.send(outgoing, note_sent)

    def stop(reason: str) -> None:
        sent.cancel()

    node.attach(action, stop)
    request = f"{method} {_address(url)}"
    try:
        answer = sent.result()
    except CancelledError:
        raise ActionCancelled(action.cancel_reason or "the worker is being stopped", action.cancel_cause) from None
    except TimeoutError:
        raise ActionTimedOut(f"{request}: no answer within {timeout_s:g} s", "api_timeout") from None
    except (httpx.InvalidURL, httpx.UnsupportedProtocol, HostRefused, ValueError, TypeError) as error:
        raise ActionRefused(f"{request}: {_problem(error)}", type(error).__name__) from None
    except (httpx.HTTPError, httpx.StreamError) as error:
        raise ActionFailed(f"{request}: {_problem(error)}", "api_failed") from None
    action.execution_s = answer.execution_s
    action.answer = report(answer, answer.requests, action.grant.get("usage_header"))
    if refuses(answer) and action.grant.get("may_wait_again"):
        action.waits_again, action.reason = True, f"{request}: answered {answer.status_code}"[:1000]
        return {}
    return {
        "status_code": answer.status_code,
        "headers": dict(answer.headers),
        "body": here.blobs.put(answer.body),
        "truncated": answer.truncated,
    }


def _address(url: str) -> str:
    """Return a URL as reasons may show it, which many people read: user, password, query and fragment are places for secrets."""
    try:
        return str(httpx.URL(url).copy_with(username=None, password=None, query=None, fragment=None))
    except (httpx.InvalidURL, TypeError):
        return "a URL that cannot be read"


def _problem(error: BaseException) -> str:
    """Say in one line what went wrong, with the reason that the operating system gives."""
    said = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, (httpx.InvalidURL, TypeError)):
        said = said.partition(":")[0]  # a part of the URL follows
    elif isinstance(error, httpx.LocalProtocolError):
        said = _QUOTED.sub("", said)  # of a header that cannot be sent, such as a key with a line break
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno:
            reason = cause.strerror if isinstance(cause, socket.gaierror) else os.strerror(cause.errno)
            return said if not reason or reason in said else f"{said}: {reason}"
        cause = cause.__cause__ or cause.__context__
    return said
