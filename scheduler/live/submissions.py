"""Reading what clients submit: the header of an action's message, of which nothing is trusted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from scheduler.live.transport import Received
from tangram.action import Action
from tangram.errors import InvalidAction
from tangram.wire import ACTION_HEADER

UNREADABLE = Action(kind="unreadable")
"""The journal's entry for an action whose header cannot be understood."""


def submitted_at(received: Received, now: float) -> float:
    """Return when an action was submitted, by its client's clock; `now` if that makes no sense."""
    at = received.header.get("submitted_at", now) if isinstance(received.header, Mapping) else now
    return now if isinstance(at, bool) or not isinstance(at, (int, float)) or not now - 86_400 <= at <= now else at


def action_of(received: Received) -> Action:
    """Return the action that a message describes. Raises `InvalidAction` or `TypeError` if it describes none."""
    if not isinstance(received.header, Mapping):
        raise InvalidAction(received.task, "the message does not describe its action: send it with `tangram.Client` or `app.routing`")
    header = {name: value for name, value in received.header.items() if name not in ("submitted_at", "blobs", "again")}
    if header.get("kind") != received.task:
        raise InvalidAction("kind", f"the message is for the task {received.task!r}, its header says {header.get('kind')!r}")
    return Action.from_header(header)


def is_repeated(received: Received) -> bool:
    """Return whether a client has submitted an action again, since it has no result."""
    return isinstance(received.header, Mapping) and received.header.get("again") is True


def blobs_of(header: object) -> Sequence[object]:
    """Return the blobs to which an action's message refers, by its header."""
    blobs = header.get("blobs") if isinstance(header, Mapping) else None
    return blobs if isinstance(blobs, list) else ()


def blobs_of_kept(message: str) -> Sequence[object]:
    """Return the blobs to which a kept message refers."""
    return blobs_of(json.loads(message)["headers"].get(ACTION_HEADER)) if '"blobs"' in message else ()
