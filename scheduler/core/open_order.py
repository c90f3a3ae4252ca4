"""Which waiting environment is opened next, and on which node.

1. The job that holds least of its entitlement goes first. What counts is its part of the memory that environments can have, or its part of
   the start slots where that is larger (`Environments.places`). Within a job it is first come, first served.
2. An open that fits nowhere lets others pass.
3. That has a bound. A job's first open that has waited for `KEPT_AFTER_S` keeps a node: no other environment is opened there until this
   one is. One open at a time does so for each set of labels, in the order of shares. A job beyond its part of the memory keeps none.
4. An open of a job within its part that has waited for `PATIENT_WINDOWS` windows comes before the shares.

A node is kept from other environments alone. Actions that hold memory while they run give it back soon, and an environment that stands may
need them to come to its end.
"""

from __future__ import annotations

from typing import Final

from scheduler.core.open_queue import Needs, OpenQueue
from scheduler.cpu.pool import CpuPool
from scheduler.model import Waiting
from scheduler.model.shares import Shares
from scheduler.model.state import PATIENT_WINDOWS, Node, State, memory_of
from tangram.action import MEMORY_MB

KEPT_AFTER_S: Final = 60.0
"""Seconds for which others may pass an open that fits nowhere. Environments live for minutes. A shorter time would empty nodes for opens
that are about to find room by themselves; a longer one adds to the wait of a large environment, which is this time and that in which
its node empties."""


class OpenOrder:
    """Chooses among the waiting opens. A node in `_kept` is kept for the open that stands there."""

    def __init__(self, state: State, cpu: CpuPool, opens: OpenQueue, places: Shares) -> None:
        self._state = state
        self._cpu = cpu
        self._opens = opens
        self._places = places
        self._kept: dict[str, Waiting] = {}

    def next(self, now: float) -> tuple[Waiting, Node] | None:
        """Return the open that is next, and its node; None where nothing fits."""
        self._keep(now)
        for waiting in self._kept.values():
            node = self._node_for(waiting)
            if node is not None:
                return waiting, node
        found = min(self._opens.fitting(self._most_memory), key=lambda waiting: self._rank(waiting, now), default=None)
        if found is None:
            return None
        node = self._node_for(found)
        assert node is not None, "it fits into the largest free memory"
        return found, node

    def _rank(self, waiting: Waiting, now: float) -> tuple[float, tuple[float, ...]]:
        state, job = self._state, waiting.action.job
        if not state.rules.shares:
            return 0.0, waiting.key
        patient = now - waiting.received_at >= PATIENT_WINDOWS * state.limits.window_s
        if patient and not self._beyond(waiting):
            return -1.0, (waiting.received_at, waiting.seq)
        return self._places.dominant(job) / self._places.entitlement(job), waiting.key

    def _able(self, needs: Needs) -> list[Node]:
        """Return the nodes that have what is needed now, memory apart."""
        return [node for node in self._could_stand(needs, 0) if self._free_cores(node) >= needs.pod_cores]

    def _most_memory(self, needs: Needs) -> int:
        """Return the most memory that is free on a node that is kept for nobody and has what is needed; -1 without such a node."""
        return max((node.memory_free for node in self._able(needs) if node.spec.name not in self._kept), default=-1)

    def _could_stand(self, needs: Needs, memory_mb: int) -> list[Node]:
        """Return the nodes that would have room were they empty."""
        nodes = self._state.nodes.values()
        able = (node for node in nodes if node.spec.cores >= needs.cores and node.spec.memory_mb >= memory_mb)
        return [node for node in able if node.offers("cpu", needs.requires)]

    def _node_for(self, waiting: Waiting) -> Node | None:
        """Return the node with fewest environments for each core among those that have room now."""
        memory_mb = memory_of(waiting.action)
        able = (node for node in self._able(self._opens.needs_of(waiting)) if node.memory_free >= memory_mb)
        fitting = [node for node in able if self._kept.get(node.spec.name, waiting) is waiting]
        return min(fitting, key=lambda node: (len(node.environments) / node.spec.cores, -node.memory_free), default=None)

    def _keep(self, now: float) -> None:
        """Keep nodes for those that others have passed for long enough; give up those that are needed no more."""
        state = self._state
        self._kept = {name: waiting for name, waiting in self._kept.items() if name in state.nodes and waiting in self._opens}
        served = {waiting.action.requires for waiting in self._kept.values()}
        since = now - KEPT_AFTER_S
        passed = [one for one in self._opens.too_large(self._most_memory) if one.received_at <= since]
        for waiting in sorted(passed, key=lambda one: self._rank(one, now)):
            if waiting.action.requires not in served and not self._beyond(waiting) and self._keep_node(waiting):
                served.add(waiting.action.requires)

    def _beyond(self, waiting: Waiting) -> bool:
        """Say whether the job of an open has more of the memory than it is entitled to."""
        return self._state.rules.shares and self._places.over_in(waiting.action.job, MEMORY_MB)

    def _keep_node(self, waiting: Waiting) -> bool:
        """Keep the node on which least is missing; False where none that is not kept yet could ever have room."""
        needs, memory_mb = self._opens.needs_of(waiting), memory_of(waiting.action)
        nodes = [node for node in self._could_stand(needs, memory_mb) if node.spec.name not in self._kept]
        if not nodes:
            return False
        least = min(nodes, key=lambda node: (max(0, memory_mb - node.memory_free), max(0, needs.pod_cores - self._free_cores(node))))
        self._kept[least.spec.name] = waiting
        return True

    def _free_cores(self, node: Node) -> int:
        return self._cpu.groups[node.spec.name].free
