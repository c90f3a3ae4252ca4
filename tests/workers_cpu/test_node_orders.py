"""What a node makes of grants, of resizes that come before or after a claim, and of what its commands use."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from redis import Redis

from tangram.wire import WireGrant, WireNode
from workers.cpu.abstract import Holding, Usage
from workers.node import Node

DESCRIPTION: WireNode = {
    "name": "n", "kinds": ["cpu"], "labels": [], "cores": 4, "memory_mb": 1, "cells": 0, "cell_memory_mb": 0, "services": {},
    "running": [], "environments": [],
}  # fmt: skip
GRANT: WireGrant = {
    "node": "n", "attempt": 1, "epoch": 1, "units": 1, "core_ids": [2], "share": 0.25, "cell_ids": [], "evict": [], "restore": False,
    "submitted_at": 1.0, "received_at": 1.0, "granted_at": 1.0,
}  # fmt: skip


def make_node(store: Redis, usage_s: float) -> Node:
    """Return a node that has not joined: what it would report stays with it."""
    return Node(Celery(set_as_current=False), store, DESCRIPTION, beat_s=1.0, usage_s=usage_s)


@pytest.fixture
def node(redis_urls: Any) -> Node:
    """Return a node that says what its commands use as soon as they have begun."""
    return make_node(redis_urls.client(), 1e-9)


def held(grant: WireGrant) -> tuple[list[int], int, float]:
    return grant["core_ids"], grant["units"], grant["share"]


def test_a_running_call_has_the_share_of_its_last_resize(node: Node) -> None:
    # Given a call on a quarter of a core
    call = node.claim("a", GRANT, {})
    assert call is not None
    asked: list[Holding] = []
    node.attach(call, lambda reason: None, asked.append)
    # When it gets two cores, then half of one of them
    node.resize("a", 1, (2, 3), 1.0)
    assert held(call.grant) == ([2, 3], 2, 1.0)
    node.resize("a", 1, (3,), 0.5)
    # Then it has that, its process tree was told each time, and a resize of another try changes nothing
    node.resize("a", 2, (0, 1), 1.0)
    assert held(call.grant) == ([3], 1, 0.5)
    assert asked == [Holding((2,), 0.25), Holding((2, 3)), Holding((3,), 0.5)]


def test_a_resize_that_overtakes_the_grant_is_kept_for_it(node: Node) -> None:
    # Given a resize of a try that has not come yet; when it comes; then it runs as resized
    node.resize("a", 1, (0,), 0.5)
    call = node.claim("a", GRANT, {})
    assert call is not None
    assert held(call.grant) == ([0], 1, 0.5)


def test_only_commands_on_cores_are_reported_while_they_run(node: Node) -> None:
    # Given calls that were looked at: one on cores, one without; and one that was not looked at yet
    for action_id, grant, usage in (
        ("on-cores", GRANT, Usage(cpu_s=1.5, at=9.0)),
        ("without", {**GRANT, "core_ids": []}, Usage(cpu_s=0.5, at=9.0)),
        ("fresh", GRANT, None),
    ):
        call = node.claim(action_id, grant, {})  # type: ignore[arg-type]
        assert call is not None
        node.attach(call, lambda reason: None, None, lambda usage=usage: usage)  # type: ignore[misc]
    # When the node says what they use; then it says so of the first alone
    assert node.used() == [{"type": "used", "id": "on-cores", "attempt": 1, "cpu_s": 1.5, "at": 9.0}]
    # And of none that is over
    node.finish(node.call("on-cores"))
    assert node.used() == []


def test_nothing_is_said_of_commands_that_have_just_begun(redis_urls: Any) -> None:
    node = make_node(redis_urls.client(), 60.0)
    call = node.claim("a", GRANT, {})
    assert call is not None
    node.attach(call, lambda reason: None, None, lambda: Usage(cpu_s=1.0, at=1.0))
    assert node.used() == []
