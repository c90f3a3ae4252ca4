"""Rules: what a policy says to the books that all pools share. What each pool does with its units is its dispatcher's."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.model import Limits, Waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How actions are queued, and what is known of them.

    Attributes
    ----------
    by_window
        Whether a class of priority puts an action forward by `Limits.window_s` in its queue. Without, the order of arrival counts.
    ranks
        Whether actions that want cores stand in the order of the work that is expected to be left.
    learns
        Whether durations are learned. Without, only what was declared is known.
    profiled
        Whether replays tell the recorded durations, as if all actions had been profiled ahead.
    shares
        Whether jobs that hold more than their share come after the others.
    preempts
        Whether cores are taken back from running commands, which go on in the background.
    resizes
        Whether running actions may be given more units and fewer again.
    shares_cells
        Whether instances of several services may be resident on one GPU cell, where its memory allows.
    pod_cores
        The cores that an environment holds for its whole life; None where cores are granted to actions.
    owned_cells
        Whether each service owns an equal part of all cells for good.

    """

    by_window: bool = False
    ranks: bool = False
    learns: bool = False
    profiled: bool = True
    shares: bool = False
    preempts: bool = False
    resizes: bool = False
    shares_cells: bool = False
    pod_cores: int | None = None
    owned_cells: bool = False

    def order_key(self, waiting: Waiting, limits: Limits) -> tuple[float, ...]:
        """Return the place of an action in its queue: smaller goes first."""
        if self.by_window:
            return (waiting.received_at - limits.window_s * waiting.action.priority, waiting.seq)
        return (waiting.seq,)
