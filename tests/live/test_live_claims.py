"""Which tries of actions a node claims: each once, of the scheduler that leads, and meant for this worker process."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery

from app.action_task import Call
from tangram.wire import WireGrant, WireNode
from workers.node import Node

DESCRIPTION: WireNode = {
    "name": "n", "kinds": ["cpu"], "labels": [], "cores": 4, "memory_mb": 1, "cells": 0, "cell_memory_mb": 0, "services": {},
    "running": [], "environments": [],
}  # fmt: skip
GRANT: WireGrant = {
    "node": "n", "attempt": 1, "epoch": 7, "units": 1, "most_units": 1, "core_ids": [2], "background": False, "cell_ids": [], "evict": [],
    "restore": False, "submitted_at": 1.0, "received_at": 1.0, "granted_at": 1.0,
}  # fmt: skip


@pytest.fixture
def nodes(redis_urls: Any) -> tuple[Node, Node]:
    """Return two nodes over one store, neither of which has joined: what they would report stays with them."""
    store = redis_urls.client()
    first, second = (Node(Celery(set_as_current=False), store, DESCRIPTION, beat_s=1.0, usage_s=1.0, timeout_s=60.0) for _ in range(2))
    return first, second


def claim(node: Node, action_id: str = "a", **other: object) -> Call | None:
    """Claim the try of `GRANT`, or of one that is a bit other."""
    return node.claim(action_id, {**GRANT, **other}, {})  # type: ignore[typeddict-item]


def test_a_grant_of_a_scheduler_that_was_replaced_is_dropped(nodes: tuple[Node, Node]) -> None:
    # Given a node that has had a grant of one scheduler; when one of an earlier scheduler comes; then it is dropped, and no later one is
    node, _ = nodes
    assert claim(node) is not None
    assert claim(node, "late", epoch=6) is None
    assert claim(node, "next", epoch=8) is not None


def test_a_grant_for_the_worker_before_is_dropped(nodes: tuple[Node, Node]) -> None:
    node, _ = nodes
    assert claim(node, incarnation="that of before") is None
    assert claim(node, incarnation=node._incarnation) is not None


def test_a_stop_that_overtakes_its_grant_stops_the_call_at_once(nodes: tuple[Node, Node]) -> None:
    # Given a stop of a try that has not come; when it comes and begins
    node, _ = nodes
    node.stop("a", 1, "its job was cancelled")
    call, stopped = claim(node), list[str]()
    assert call is not None
    node.attach(call, stopped.append)
    # Then it is stopped, and the next try is not
    assert stopped == ["its job was cancelled"]
    node.finish(call)
    again = claim(node, attempt=2)
    assert again is not None and again.cancel_reason == ""
