"""The three pools, and the choice of an action's pool.

| an action needs | pool |
|---|---|
| GPU cells | `scheduler/gpu/pool.py` |
| cores, or nothing that is counted | `scheduler/cpu/pool.py` |
| quotas and nothing else | `scheduler/quotas/pool.py` |
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.cpu.pool import CpuPool, could_run
from scheduler.gpu.pool import GpuPool, can_run
from scheduler.learning.durations import Observation
from scheduler.model import QuotaSpec, Waiting
from scheduler.model.commands import Command
from scheduler.model.pool import Pool
from scheduler.model.state import Node, State, wants_cells
from scheduler.policies import Policy
from scheduler.quotas.answers import only_calls
from scheduler.quotas.pool import QuotaPool
from tangram.action import Action


class Pools:
    """The pools of one policy."""

    def __init__(self, state: State, policy: Policy, quotas: Sequence[QuotaSpec], history: Sequence[Observation]) -> None:
        self.quotas = QuotaPool(state, quotas)
        self.cpu = CpuPool(state, self.quotas, policy.cores, history)
        self.gpu = GpuPool(state, self.quotas, policy.cells)
        self._all: tuple[Pool, ...] = (self.cpu, self.gpu, self.quotas)
        self.looks = 0
        """How often a node was looked at again. Opens wait outside the pools, and compare two readings of this count."""

    def of(self, action: Action) -> Pool:
        """Return the pool that an action waits in."""
        if wants_cells(action):
            return self.gpu
        return self.quotas if only_calls(action) else self.cpu

    def could_run(self, waiting: Waiting) -> bool:
        """Say whether a node could run an action that is bound to none now, were it all free."""
        if wants_cells(waiting.action):
            return any(can_run(waiting, group, self.cpu.state) for group in self.gpu.groups.values())
        return any(could_run(waiting, node, node.spec.cores) for node in self.cpu.state.nodes.values())

    def joined(self, node: Node) -> None:
        """Take in the units of a node."""
        for pool in self._all:
            pool.joined(node)

    def gone(self, node: Node) -> None:
        """Forget a node and its units."""
        for pool in self._all:
            pool.gone(node)

    def look_again(self, node: Node) -> None:
        """Look again at all actions that wait for a node's memory, or for it to take something new."""
        self.looks += 1
        for pool in self._all:
            pool.look_again(node)

    @property
    def changed(self) -> bool:
        """Whether a pool would hold a round."""
        return any(pool.changed for pool in self._all)

    def allocate(self, now: float) -> list[Command]:
        """Have each pool hold its rounds; return the decisions in order."""
        return [command for pool in self._all for command in pool.allocate(now)]

    def wake(self, now: float) -> None:
        """Take note of the time."""
        for pool in self._all:
            pool.wake(now)

    def next_wake(self, now: float) -> float | None:
        """Return when time alone makes a round necessary."""
        return min([at for pool in self._all if (at := pool.next_wake(now)) is not None], default=None)
