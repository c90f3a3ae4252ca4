"""Why an action is refused at once instead of being queued: it could never run, or its job has too many waiting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scheduler.core.gone import GoneEnvironments
from scheduler.core.pools import Pools
from scheduler.model import Environment
from scheduler.model.state import State
from tangram.action import Action


@dataclass(frozen=True, slots=True)
class Refusal:
    """How a refused action ends, and why; `environment_lost_on` is the node on which its environment was lost."""

    reason: str
    status: Literal["rejected", "failed", "lost"] = "rejected"
    environment_lost_on: str = ""


class Admission:
    """Says which actions are let in."""

    def __init__(self, state: State, pools: Pools, gone: GoneEnvironments) -> None:
        self._state = state
        self._pools = pools
        self._gone = gone

    def refusal(self, action: Action, now: float) -> Refusal | None:
        """Return why `action`, already counted as waiting, is refused at time `now`; None where it is not.

        Where no node of the right pool is up there is nothing to compare with, and the action waits.
        """
        state, pools = self._state, self._pools
        if state.waiting_by_job[action.job] > state.limits.queue_limit and action.kind != "cpu.close":
            return Refusal(f"job {action.job} has {state.limits.queue_limit} actions waiting already")
        reason = pools.quotas.refusal(action)
        if reason is not None:
            return Refusal(reason)
        if action.environment is not None:
            refused = self._environment_refusal(action, state.environments.get(action.environment), now)
            if refused is not None:
                return refused
        pool = pools.of(action) if action.environment is None else pools.cpu
        reason = pool.refusal(action) if pool is not pools.quotas else None
        return Refusal(reason) if reason is not None else None

    def _environment_refusal(self, action: Action, environment: Environment | None, now: float) -> Refusal | None:
        if action.kind == "cpu.open":
            return Refusal(f"environment {action.environment} is open already") if environment is not None else None
        if environment is None:
            return self._gone_refusal(action.environment or "", now)
        if environment.lost:
            return Refusal(f"environment {environment.id} is lost: {environment.over}", "lost", environment.node or "")
        if environment.state == "closing":
            return Refusal(f"environment {environment.id} is being closed: {environment.close_requested}", "failed")
        return None

    def _gone_refusal(self, environment_id: str, now: float) -> Refusal:
        """Return how an environment ended that is no longer there, as far as that is known."""
        gone = self._gone.get(environment_id)
        if gone is None:
            return Refusal(f"environment {environment_id} is unknown: it was never opened, or ended long ago", "failed")
        if gone.state == "lost":
            return Refusal(f"environment {environment_id} is lost: {gone.reason}", "lost", gone.node)
        return Refusal(f"environment {environment_id} was closed {max(0.0, now - gone.at):.0f} s ago: {gone.reason}", "failed")
