"""Rules: the part of a policy that all pools share. Each pool's dispatcher decides on the units of the pool."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.model import Limits, Waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How actions are queued, and what the scheduler knows of them."""

    by_window: bool = False
    """Whether a class of priority puts an action forward by `Limits.window_s` in its queue. Else the order of arrival counts."""
    ranks: bool = False
    """Whether actions that want cores are ordered by expected work left."""
    learns: bool = False
    """Whether durations are learned. Else only declared durations are known."""
    profiled: bool = True
    """Whether a replay gives the recorded durations, as if all actions had been profiled before."""
    shares: bool = False
    """Whether jobs beyond their share come last."""
    preempts: bool = False
    """Whether running commands may lose their cores and go on in the background."""
    resizes: bool = False
    """Whether running actions may grow and shrink."""
    shares_cells: bool = False
    """Whether instances of several services may share a GPU cell, if its memory allows."""
    grants_memory: bool = False
    """Whether environments are granted memory as they use it, on nodes that can do that. Else each holds its limit."""
    pod_cores: int | None = None
    """Cores that an environment holds for its whole life; None if cores are granted to actions."""
    owned_cells: bool = False
    """Whether each service owns an equal part of all cells for good."""

    def order_key(self, waiting: Waiting, limits: Limits) -> tuple[float, ...]:
        """Return the place of an action in its queue: smaller goes first."""
        if self.by_window:
            return (waiting.received_at - limits.window_s * waiting.action.priority, waiting.seq)
        return (waiting.seq,)
