"""Which tries of actions a node claims: each once, of the scheduler that leads, and meant for this worker process."""

from __future__ import annotations

import pytest
from celery import Celery

from app.action_task import Call
from app.broker.memory_store import MemoryBroker, MemoryStore
from tangram.wire import CLAIM_KEY_PREFIX, CLAIM_TTL_S, WireGrant, WireNode
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
def store() -> MemoryStore:
    return MemoryStore(MemoryBroker())


@pytest.fixture
def node(store: MemoryStore) -> Node:
    """Return a node that has not joined: what it would report stays with it."""
    return Node(Celery(set_as_current=False), store, DESCRIPTION, beat_s=1.0, usage_s=1.0, timeout_s=60.0)  # type: ignore[arg-type]


def claim(node: Node, action_id: str = "a", **other: object) -> Call | None:
    """Claim the try of `GRANT`, or of one that is a bit other."""
    return node.claim(action_id, {**GRANT, **other}, {})  # type: ignore[typeddict-item]


def test_a_grant_of_a_scheduler_that_was_replaced_is_dropped(node: Node) -> None:
    # Given a node that has had a grant of one scheduler; when one of an earlier scheduler comes; then it is dropped, and no later one is
    assert claim(node) is not None
    assert claim(node, "late", epoch=6) is None
    assert claim(node, "next", epoch=8) is not None


def test_a_grant_for_the_worker_before_is_dropped(node: Node) -> None:
    assert claim(node, incarnation="that of before") is None
    assert claim(node, incarnation=node._incarnation) is not None


def test_a_claim_outlives_the_timeout_of_its_action(node: Node, store: MemoryStore) -> None:
    # Given an action that may run for longer than claims are kept beyond that
    timeout_s = 3.0 * CLAIM_TTL_S
    assert node.claim("a", GRANT, {"timeout_s": timeout_s}) is not None
    assert store.pttl(f"{CLAIM_KEY_PREFIX}a:1") > 1000 * (timeout_s + CLAIM_TTL_S / 2)


def test_a_stop_that_overtakes_its_grant_stops_the_call_at_once(node: Node) -> None:
    # Given a stop of a try that has not come; when it comes and begins
    node.stop("a", 1, "its job was cancelled")
    call, stopped = claim(node), list[str]()
    assert call is not None
    node.attach(call, stopped.append)
    # Then it is stopped, and the next try is not
    assert stopped == ["its job was cancelled"]
    node.finish(call)
    again = claim(node, attempt=2)
    assert again is not None and again.cancel_reason == ""


def test_a_node_that_leaves_stops_what_runs_and_claims_nothing_more(node: Node) -> None:
    # Given a call that runs; when its node leaves; then it is stopped, and no other is begun
    call, said = claim(node), list[str]()
    assert call is not None
    node.attach(call, said.append)
    node.leave(0.0)
    assert said == ["node n is being stopped"]
    assert claim(node, "next") is None
