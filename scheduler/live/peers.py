"""What the schedulers of several shards tell each other: what jobs hold, so that shares count over all of them.

Each says it at every housekeeping, and takes what the others said last to its core as an event. A shard whose scheduler is gone says
nothing any more after `LOAD_TTL_S`: its nodes and what jobs hold there count no more. With one shard nothing is said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from scheduler.core.core import Core
from scheduler.live.transport import Transport
from scheduler.model import events
from tangram.action import Action
from tangram.shards import shard_of
from tangram.wire import WireHoldings, WireLoad, is_node_label

MOST_JOBS: Final = 1000
"""The most jobs of which a shard says what they hold: those that have been active for longest."""


class Peers:
    """The other shards, as the scheduler of one sees them. `handle` takes an event to the core."""

    def __init__(self, core: Core, transport: Transport, handle: Callable[[events.Event, float], None], shard: int, shards: int) -> None:
        self._core, self._transport, self._handle = core, transport, handle
        self._shard, self._shards = shard, shards
        self._last = events.HeldElsewhere(units=events.Holdings(), memory=events.Holdings())

    def refusal(self, action: Action) -> str:
        """Return why an action is not this shard's; empty if it may be."""
        if self._shards == 1 or action.environment is None:
            return ""
        of = shard_of(action.environment, self._shards)
        if of == self._shard:
            return ""
        return (
            f"environment {action.environment} is of shard {of}, and the action came to shard {self._shard} of {self._shards}: "
            "whoever sent it has another TANGRAM_SHARDS"
        )

    def exchange(self, now: float) -> None:
        """Say what this shard carries, and take in what the others said, where there are others."""
        if self._shards == 1:
            return
        said = self._transport.exchange(self._load(now))
        if said is None:
            return
        held = events.HeldElsewhere(units=_sum(load["units"] for load in said), memory=_sum(load["memory"] for load in said))
        if held != self._last:
            self._last = held
            self._handle(held, now)

    def _load(self, now: float) -> WireLoad:
        state = self._core.state
        nodes = [node for node in state.nodes.values() if node.offers("cpu", ())]
        able = [node for node in nodes if node.takes_new and node.rests_until <= now]
        kinds: dict[tuple[str, ...], int] = {}
        for node in nodes:
            labels = tuple(sorted(label for label in node.spec.labels if not is_node_label(label)))
            kinds[labels] = max(kinds.get(labels, 0), node.spec.memory_mb)
        return {
            "cores": sum(node.spec.cores for node in able),
            "labels": sorted({label for node in nodes for label in node.spec.labels}),
            "kinds": [{"labels": list(labels), "memory_mb": memory_mb} for labels, memory_mb in kinds.items()],
            "environments": sum(len(node.environments) for node in able),
            "opening": int(self._core.opening(now)["waiting"]),
            "units": state.shares.own(MOST_JOBS),
            "memory": self._core.memory_shares.own(MOST_JOBS),
        }


def _sum(holdings: Iterable[WireHoldings]) -> events.Holdings:
    offered, held = Counter[str](), dict[str, Counter[str]]()
    for one in holdings:
        offered.update(one["offered"])
        for job, amounts in one["held"].items():
            held.setdefault(job, Counter()).update(amounts)
    return events.Holdings(offered=dict(offered), held={job: dict(amounts) for job, amounts in held.items()})
