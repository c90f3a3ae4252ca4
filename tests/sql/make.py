"""Entries with sensible values for all that a test does not care about."""

from __future__ import annotations

from typing import Any

from scheduler.live.entries import (
    ActionEnded,
    ActionGranted,
    ActionReceived,
    ActionRequeued,
    ActionResized,
    Entry,
    EnvironmentChanged,
    InstanceChanged,
    NodeChanged,
)
from scheduler.model.commands import Finish


def received(id: str = "a1", at: float = 100.0, *, message: str = '["args"]', **header: Any) -> ActionReceived:
    """Receive an action that was submitted half a second before `at`."""
    words = {"kind": "cpu.exec", "cost": {"cores": [1, 2]}, "job": "coding", "trajectory": "t1", "environment": "e1"}
    return ActionReceived(id=id, header={**words, **header}, message=message, submitted_at=at - 0.5, received_at=at)


def granted(id: str = "a1", at: float = 101.0, *, attempt: int = 1, **changes: Any) -> ActionGranted:
    """Two cores on node n1."""
    values: dict[str, Any] = {"node": "n1", "units": 2, "core_ids": (4, 5), "cell_ids": ()}
    return ActionGranted(id=id, attempt=attempt, granted_at=at, **{**values, **changes})


def resized(id: str = "a1", at: float = 101.5, *, attempt: int = 1, core_ids: tuple[int, ...] = (4,), units: int = 0) -> Entry:
    """To one core of two; without any, to the background, where `units` are those that it had."""
    held = {"core_ids": core_ids, "units": len(core_ids) or units, "background": not core_ids}
    return ActionResized(id=id, attempt=attempt, at=at, unit_s=at - 100.0, **held)


def requeued(id: str = "a1", at: float = 102.0) -> ActionRequeued:
    """After the loss of its node."""
    return ActionRequeued(id=id, reason="node n1 was lost", at=at, unit_s=at - 100.0)


def ended(id: str = "a1", at: float = 103.0, excerpt: dict[str, Any] | None = None, **changes: Any) -> ActionEnded:
    """Succeeded after 1 s in the queue, 0.25 s of overhead and 2 s of execution."""
    values: dict[str, Any] = {"status": "succeeded", "reason": "", "by_worker": True, "started_at": at - 2.0, "cpu_s": 1.5, "dop": 2}
    parts = {"queue_s": 1.0, "overhead_s": 0.25, "execution_s": 2.0}
    return ActionEnded(end=Finish(id=id, **{**values, **parts, **changes}), at=at, excerpt=excerpt)


def environment(state: str, at: float, *, id: str = "e1", **changes: Any) -> EnvironmentChanged:
    """Of trajectory t1 on node n1."""
    values: dict[str, Any] = {"node": "n1", "job": "coding", "trajectory": "t1", "memory_mb": 512, "pod_cores": 0}
    return EnvironmentChanged(id=id, state=state, at=at, **{**values, **changes})


def node(state: str, at: float, *, name: str = "n1", **description: Any) -> NodeChanged:
    """With eight cores."""
    return NodeChanged(name=name, state=state, description={"cores": 8, "services": {}, **description}, at=at)


def instance(state: str, at: float, *, node: str = "n1", service: str = "judge", **changes: Any) -> InstanceChanged:
    """On cells 0 and 1."""
    return InstanceChanged(node=node, service=service, state=state, at=at, **{"cell_ids": (0, 1), **changes})
