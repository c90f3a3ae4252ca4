"""What the core asks of a pool.

A pool owns its units, its queue and its dispatcher. Nobody else changes its books. An action goes one way: the core routes it to a
pool (`enqueue`), the pool decides (`allocate`), and the core hands the decisions to its driver as commands. When an action has ended,
the core gives what it held back (`release`).
"""

from __future__ import annotations

from typing import Protocol

from scheduler.model import Running, Waiting
from scheduler.model.commands import Command
from scheduler.model.state import Node
from tangram.action import Action


class Pool(Protocol):
    """Cores, GPU cells, or quotas."""

    def refusal(self, action: Action) -> str | None:
        """Return why an action could never run; None where it could, or where that is not known yet."""

    def enqueue(self, waiting: Waiting, now: float) -> None:
        """Take in an action that waits for units."""

    def withdraw(self, waiting: Waiting) -> None:
        """Take a waiting action out of its queue."""

    def release(self, running: Running, now: float) -> None:
        """Take back what an action held that has ended."""

    def resume(self, running: Running, now: float) -> list[Command]:
        """Take in an action that an earlier scheduler started, with what it holds; return what its worker must know at once."""

    def joined(self, node: Node) -> None:
        """Take in the units of a node."""

    def gone(self, node: Node) -> None:
        """Forget a node and its units. What ran there has been released before."""

    def memory_returned(self, node: Node) -> None:
        """Take note that a node has more memory free: those who wait for memory may start."""

    @property
    def changed(self) -> bool:
        """Whether `allocate` would hold a round."""

    def allocate(self, now: float) -> list[Command]:
        """Hold a round over what has changed; return the decisions, as commands in order."""

    def wake(self, now: float) -> None:
        """Take note of the time: what was to happen by now is part of the next round."""

    def next_wake(self, now: float) -> float | None:
        """Return when a round would change something though nothing else has happened; None where none would."""
