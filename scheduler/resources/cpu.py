"""Cores: the free ones of a node, and the ones of a pod.

A node's cores are one group. Under a policy with pods, each environment takes cores out of that group for its
whole life and is a group of its own. Core ids are given lowest first, so that grants lie together.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

from scheduler.model import Running
from scheduler.policies.abstract import Group, Release
from scheduler.resources.queue import WaitQueue


class CoreGroup(Group):
    """Interchangeable cores with a queue of the actions that are bound to them."""

    def __init__(self, node: str, core_ids: Iterable[int]) -> None:
        self.node = node
        self._free = sorted(core_ids)
        self.capacity = len(self._free)
        self.queue = WaitQueue()
        self.running: dict[str, Running] = {}
        self.elastic: dict[str, Running] = {}

    @property
    def free(self) -> int:
        """Cores that can be granted now."""
        return len(self._free)

    def releases(self) -> Iterable[Release]:
        """Return the expected ends of what runs on these cores."""
        return (Release(running.expected_end, len(running.grant.core_ids)) for running in self.running.values())

    def resizable(self) -> list[Running]:
        """Return the running actions that could use other amounts and are not being stopped."""
        return [running for running in self.elastic.values() if not running.stopping]

    def enter(self, running: Running) -> None:
        """Note what runs on these cores."""
        self.running[running.waiting.id] = running
        if len(running.waiting.units) > 1:
            self.elastic[running.waiting.id] = running

    def leave(self, running: Running) -> None:
        """Forget what ran, and take its cores back."""
        self.running.pop(running.waiting.id, None)
        self.elastic.pop(running.waiting.id, None)
        self.give_back(running.grant.core_ids)

    def take(self, count: int) -> tuple[int, ...]:
        """Take the lowest `count` free cores. Raises `ValueError` where there are fewer."""
        if count > len(self._free):
            raise ValueError(f"{count} cores wanted of {len(self._free)} free ones on {self.node}")
        taken = tuple(self._free[:count])
        del self._free[:count]
        return taken

    def claim(self, core_ids: Iterable[int]) -> tuple[int, ...]:
        """Take these very cores as far as they are free, for a grant made by an earlier scheduler; return those taken."""
        claimed = tuple(core_id for core_id in core_ids if core_id in self._free)
        self._free = [core_id for core_id in self._free if core_id not in claimed]
        return claimed

    def give_back(self, core_ids: Iterable[int]) -> None:
        """Return cores that were taken."""
        for core_id in core_ids:
            insort(self._free, core_id)

    def resize(self, capacity_delta: int) -> None:
        """Change the capacity by cores that pods take out of the group or bring back."""
        self.capacity += capacity_delta
