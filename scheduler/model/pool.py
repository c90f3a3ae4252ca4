"""The interface of a pool to the core.

A pool owns its units, its queue and its dispatcher. No other code changes its books. An action goes one way. The core routes the
action to a pool (`enqueue`). The pool decides (`allocate`). The core hands the decisions to its driver as commands. When the action
has ended, the core gives its units back (`release`).
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
        """Return why an action could never run; None if it could, or if the pool cannot know yet."""

    def enqueue(self, waiting: Waiting, now: float) -> None:
        """Take in an action that waits for units."""

    def withdraw(self, waiting: Waiting) -> None:
        """Take a waiting action out of its queue."""

    def release(self, running: Running, now: float) -> None:
        """Take back the units of an action that has ended."""

    def resume(self, running: Running, now: float) -> list[Command]:
        """Take in an action that an earlier scheduler started, with its units; return commands for its worker."""

    def joined(self, node: Node) -> None:
        """Take in the units of a node."""

    def gone(self, node: Node) -> None:
        """Forget a node and its units. Its actions have been released before."""

    def look_again(self, node: Node) -> None:
        """Note that a node has more memory free, or began or ceased to drain: other actions may start now."""

    @property
    def changed(self) -> bool:
        """Whether `allocate` would hold a round."""

    def allocate(self, now: float) -> list[Command]:
        """Hold a round over changed groups; return the decisions, as commands in order."""

    def wake(self, now: float) -> None:
        """Note the time. Rounds that are due by now are held by the next `allocate`."""

    def next_wake(self, now: float) -> float | None:
        """Return when time alone makes a round necessary; None if it never does."""
