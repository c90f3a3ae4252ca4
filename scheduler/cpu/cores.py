"""Cores: the free ones of a node, and the ones of a pod.

A node's cores are one group. Under a policy with pods, each environment takes cores out of the group for its whole life, and forms
a group of its own. The place of the free cores decides which of them a grant gets (`free_cores.py`).

| an action here     | is in                                                  |
|--------------------|--------------------------------------------------------|
| has not started    | `queue`, in the order in which cores are given         |
| has cores          | `running`, and `occupants` where it may lose them     |
| is in the background | `running`, `background`, and `queue`, since it wants a core |
| waits for memory   | `running` and `paused`                                 |
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

from scheduler.cpu.free_cores import Domains, FreeCores
from scheduler.cpu.marginal import Candidate, MarginalQueue
from scheduler.cpu.occupants import Occupants
from scheduler.model import Running
from scheduler.model.group import Group, Release
from scheduler.model.queue import Contenders
from scheduler.model.state import Node


class CoreGroup(Group):
    """Interchangeable cores with a queue of the actions that are bound to them."""

    def __init__(self, node: Node, domains: Domains, changed: dict[CoreGroup, None]) -> None:
        super().__init__(changed)
        self.node = node
        self._free = FreeCores(domains)
        self.capacity = self._free.count
        self.queue = Contenders()
        self.running: dict[str, Running] = {}
        self.marginal = MarginalQueue()
        self.candidates: dict[str, Candidate] = {}
        self.occupants = Occupants()
        self.background: dict[str, Running] = {}
        self.paused: dict[str, Running] = {}
        self.next_round = math.inf

    @property
    def free(self) -> int:
        """Whole cores that can be granted now."""
        return self._free.count

    @property
    def free_ids(self) -> list[int]:
        """Their ids, in ascending order."""
        return self._free.ids()

    def pod(self, core_ids: Iterable[int]) -> CoreGroup:
        """Return a group of some of these cores, with the same domains."""
        return CoreGroup(self.node, self._free.only(core_ids), self._changed)

    def releases(self) -> Iterable[Release]:
        """Return the expected ends of the actions on these cores."""
        return (Release(running.expected_end, len(running.grant.core_ids)) for running in self.running.values())

    def enter(self, running: Running, candidate: Candidate | None = None) -> None:
        """Note an action that runs on these cores.

        For an elastic action, `candidate` is its existing entry in the marginal queue.
        """
        action_id = running.waiting.id
        self.running[action_id] = running
        if candidate is not None:
            candidate.running = running
            self.candidates[action_id] = candidate
        if running.waiting.preemptible and running.grant.core_ids:
            self.occupants.enter(running)

    def adopt(self, running: Running, *, resizes: bool) -> None:
        """Note an action that an earlier scheduler had started here. Count its steps if the action may be resized."""
        candidate = Candidate.of(running.waiting, self.capacity)
        candidate.taken = sum(step.units <= running.units for step in candidate.steps)
        elastic = resizes and running.waiting.action.preemptible and bool(candidate.steps)
        if elastic and candidate.units == running.units == len(running.grant.core_ids):
            candidate.running = running
            self.marginal.enter(candidate)
            self.enter(running, candidate)
        else:
            self.enter(running)

    def to_background(self, running: Running) -> None:
        """Note that an action is in the background. The caller gives back its cores, if it had any.

        The action must be in the queue, or enter it next.
        """
        action_id = running.waiting.id
        self._off_cores(action_id)
        self.running[action_id] = self.background[action_id] = running

    def pause(self, running: Running) -> None:
        """Note that an action waits for memory and contends for no cores. The caller gives back its cores, if it had any."""
        action_id = running.waiting.id
        self._off_cores(action_id)
        if self.background.pop(action_id, None) is not None:
            self.queue.remove(running.waiting)
        self.paused[action_id] = running

    def to_foreground(self, running: Running) -> None:
        """Note that an action of the background has got cores."""
        self.queue.remove(running.waiting)
        del self.background[running.waiting.id]
        self.enter(running, None)

    def leave(self, running: Running) -> None:
        """Forget an action, and take its cores back."""
        action_id = running.waiting.id
        self.running.pop(action_id, None)
        self.paused.pop(action_id, None)
        self._off_cores(action_id)
        if self.background.pop(action_id, None) is not None:
            self.queue.remove(running.waiting)
        self.give_back(running.grant.core_ids)

    def _off_cores(self, action_id: str) -> None:
        self.occupants.leave(action_id)
        candidate = self.candidates.pop(action_id, None)
        if candidate is not None:
            self.marginal.leave(candidate)

    def take(self, count: int, near: Collection[int] = ()) -> tuple[int, ...]:
        """Take `count` free cores that lie together, close to the cores in `near`, which the action already holds.

        Raises `ValueError` if fewer are free.
        """
        if count > self._free.count:
            raise ValueError(f"{count} cores wanted of {self._free.count} free ones on {self.node.spec.name}")
        return self._free.take(count, near)

    def shrink(self, core_ids: Sequence[int], count: int) -> tuple[int, ...]:
        """Take back all but `count` of the cores that a grant holds; return the kept cores, which lie together."""
        return self._free.shrink(core_ids, count)

    def claim(self, core_ids: Iterable[int]) -> tuple[int, ...]:
        """Take the free ones of these cores, for a grant made by an earlier scheduler; return the taken cores."""
        return tuple(core_id for core_id in core_ids if self._free.claim(core_id))

    def give_back(self, core_ids: Sequence[int]) -> None:
        """Return cores that were taken."""
        self._free.give_back(core_ids)

    def resize(self, capacity_delta: int) -> None:
        """Change the capacity by cores that pods take out of the group or bring back."""
        self.capacity += capacity_delta
