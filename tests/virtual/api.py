"""An outside API in virtual time, which notes what reaches it as its owner would. It knows its limits, and nothing of a scheduler."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from app.action_task import Call
from tests.virtual.clock import EPOCH, MONOTONIC, Process, World

URL = "https://api.test/"
RETRY_AFTER_S = 2.0
LIMITS = tomllib.loads((Path(__file__).parent / "quotas.toml").read_text())["quotas"]


@dataclass
class Arrival:
    """A request that has come to the API, `late_s` after the time for which it was granted. A node may have sent it again by itself."""

    action: str
    quota: str
    node: str
    process: Process
    claimed_at: float
    at: float
    late_s: float
    is_repeat: bool
    is_over: bool = False


@dataclass
class Api:
    """The API. A request is under way there until it is answered or its connection has ended."""

    world: World
    arrivals: list[Arrival] = field(default_factory=list)
    crowds: list[str] = field(default_factory=list)
    """What was under way at once though it may not."""
    refused_at: list[float] = field(default_factory=list)
    lost_at: dict[str, float] = field(default_factory=dict)
    """When a node last began to count as lost."""

    @contextmanager
    def takes(self, call: Call, node: str, quota: str, work_s: float, *, is_repeat: bool = False) -> Iterator[None]:
        """Take a request that lasts `work_s`, or as long as the block."""
        process = self.world.process()
        assert process is not None
        due_at = max(call.grant.get("not_before", 0.0), call.grant["granted_at"])
        claimed_at, late_s = call.began - MONOTONIC, EPOCH + self.world.now - due_at
        one = Arrival(call.id, quota, node, process, claimed_at, self.world.now, late_s, is_repeat)
        self.arrivals.append(one)
        there = [other for other in self.arrivals if other.quota == quota and self._is_under_way(other)]
        if len(there) > LIMITS[quota]["concurrency"]:
            self.crowds.append(f"{len(there)} at once: {[(one.action, one.node, one.at) for one in there]}")
        self.world.later(work_s, lambda: setattr(one, "is_over", True))
        try:
            yield
        finally:
            one.is_over = True

    def _is_under_way(self, one: Arrival) -> bool:
        """Return whether a request counts. Nobody knows what a lost node does, so its requests run again, and its places go to others."""
        return not one.is_over and one.process.alive and self.lost_at.get(one.node, -1.0) < one.claimed_at
