"""Messages as text: those of actions, as the scheduler receives them and as Celery needs them for what hangs on an end, and reports."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from celery.app.task import Context
from kombu.message import Message

from scheduler.live.transport import Received
from tangram.wire import ACTION_HEADER, EVENTS_QUEUE

_PROPERTIES = ("correlation_id", "reply_to", "content_type", "content_encoding", "priority", "expiration")


def action_of(message: Message, tag: Any) -> Received:
    """Return an action that came in; `tag` is what its message is acknowledged by. Raises what decoders raise, and `ValueError`."""
    headers = message.headers or {}
    action_id, task = headers.get("id"), headers.get("task")
    if not isinstance(action_id, str) or not action_id or not isinstance(task, str):
        raise ValueError("it is no Celery task message of protocol 2")
    action_id.encode()  # half of a surrogate pair has no UTF-8 form: nothing could be stored under this id, not even its end
    properties = {key: message.properties[key] for key in _PROPERTIES if message.properties.get(key) is not None}
    properties["content_type"], properties["content_encoding"] = message.content_type, message.content_encoding
    body = message.body if isinstance(message.body, str) else bytes(message.body).decode("utf-8")
    kept = json.dumps({"body": body, "headers": headers, "properties": properties}, separators=(",", ":"))
    return Received(sort="action", id=action_id, task=task, header=headers.get(ACTION_HEADER), message=kept, tag=tag)


def reports_message(reports: Sequence[Mapping[str, Any]], queue: str = EVENTS_QUEUE) -> bytes:
    """Return a message with reports for the scheduler that reads `queue`, as `lying` has it."""
    kind = {"content_type": "application/json", "content_encoding": "utf-8"}
    return lying(queue, json.dumps({"events": reports}), {}, kind)


def lying(queue: str, body: str, headers: Mapping[str, Any], properties: Mapping[str, Any]) -> bytes:
    """Return a message as it lies in a queue on Redis or in memory, for kombu to read."""
    kind = {"content-type": properties["content_type"], "content-encoding": properties.get("content_encoding") or "utf-8"}
    others = {**properties, "delivery_tag": "", "delivery_info": {"exchange": "", "routing_key": queue}}
    return json.dumps({"body": body, **kind, "headers": headers, "properties": others}, separators=(",", ":")).encode()


def request_of(message: str) -> Context | None:
    """Return what Celery needs of a message to end the chain, the chord and the callbacks that hang on it."""
    try:
        kept = json.loads(message)
        _, _, embedded = json.loads(kept["body"])
        # Celery looks into `delivery_info`, which only a message that was consumed has, before it sends callbacks;
        # no header of a client's may stand there instead.
        return Context({**kept["headers"], **embedded, **kept["properties"], "delivery_info": {}})
    except (ValueError, KeyError, TypeError):
        return None
