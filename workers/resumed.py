"""The actions that the worker before this one has left running, and that this one goes on with.

The environment of such an action has kept its message, as it was when the command began (`cpu/shell/run_memory.py`). The worker carries
the message out once more, before it joins. So such an action takes the way of any other. It has a call, its grant can be changed, and it is
stopped, streamed and reported as ever. Two things differ:

| step | an action that is gone on with |
|---|---|
| claim | counts for the worker before this one, and so for this one: it is neither looked up nor taken in the store |
| run | its sandbox knows the action, and serves the command that runs, or ended meanwhile, in the place of beginning one |

The scheduler may have given the action up meanwhile. Then its result is refused, and it is stopped, as the beats of the node show it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from celery.app.task import Context
from kombu.message import Message

from tangram.tracing import CARRIER
from tangram.wire import ACTION_HEADER, GRANT_HEADER, WireGrant

_HEADERS = (
    "lang",
    "task",
    "id",
    "root_id",
    "parent_id",
    "group",
    "origin",
    "ignore_result",
    "retries",
    "timelimit",
    ACTION_HEADER,
    *CARRIER,
)
_EMBEDDED = ("callbacks", "errbacks", "chain", "chord")


def message_again(request: Context, grant: WireGrant) -> str:
    """Return the message of an action that runs, with its grant as it is now, as text for `read`."""
    headers = {name: value for name in _HEADERS if (value := request.get(name)) is not None}
    embedded = {name: request.get(name) for name in _EMBEDDED}
    return json.dumps({"headers": {**headers, GRANT_HEADER: grant}, "body": [request.args, request.kwargs, embedded]}, default=str)


def read(texts: Sequence[str]) -> list[Message]:
    """Return the messages that `message_again` has made, as they would come from the broker."""
    return [_message(json.loads(text)) for text in texts]


def _message(said: dict[str, Any]) -> Message:
    properties = {"correlation_id": said["headers"]["id"]}
    delivery = {"exchange": "", "routing_key": "", "priority": 0, "redelivered": False}
    body, kind = json.dumps(said["body"]), {"content_type": "application/json", "content_encoding": "utf-8"}
    return Message(
        body=body, headers=said["headers"], properties=properties, delivery_info=delivery, delivery_tag=said["headers"]["id"], **kind
    )
