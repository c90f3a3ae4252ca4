"""A node that has joined nothing: it claims what a test grants it, and what it would report stays with it."""

from __future__ import annotations

from typing import Any

from celery import Celery

from app.action_task import Call
from app.broker.memory_store import MemoryBroker, MemoryStore
from tangram.wire import WireGrant, WireNode
from workers.node import Node

DESCRIPTION: WireNode = {
    "name": "n", "kinds": ["cpu"], "labels": [], "cores": 4, "memory_mb": 1, "cells": 0, "cell_memory_mb": 0, "services": {},
    "running": [], "environments": [],
}  # fmt: skip
GRANT: WireGrant = {
    "node": "n", "attempt": 1, "epoch": 1, "units": 1, "most_units": 4, "core_ids": [2], "background": False, "cell_ids": [], "evict": [],
    "restore": False, "submitted_at": 1.0, "received_at": 1.0, "granted_at": 1.0,
}  # fmt: skip


def node_of(store: Any = None) -> Node:
    store = store or MemoryStore(MemoryBroker())
    return Node(Celery(set_as_current=False), store, DESCRIPTION, beat_s=1.0, usage_s=1.0, timeout_s=60.0)


def claim(node: Node, action_id: str = "a", **other: object) -> Call | None:
    """Claim the try of `GRANT`, or of one that is a bit other."""
    return node.claim(action_id, {**GRANT, **other}, {})  # type: ignore[typeddict-item]
