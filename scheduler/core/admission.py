"""Reasons to refuse an action at once: it could never run, or its job has too many waiting actions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scheduler.core.gone_environments import GoneEnvironments
from scheduler.core.pools import Pools
from scheduler.model import Environment
from scheduler.model.state import State
from tangram.action import Action
from tangram.ends import loss_cause


@dataclass(frozen=True, slots=True)
class Refusal:
    """The end of a refused action and its cause (`tangram/ends.py`).

    `environment_lost_on` is the node that lost its environment.
    """

    reason: str
    cause: str
    status: Literal["rejected", "failed", "lost"] = "rejected"
    environment_lost_on: str = ""


class Admission:
    """Says which actions are let in."""

    def __init__(self, state: State, pools: Pools, gone: GoneEnvironments) -> None:
        self._state = state
        self._pools = pools
        self._gone = gone

    def queue_refusal(self, action: Action) -> Refusal | None:
        """Return why `action`, which counts as waiting, is one too many of its job. Return None if it is not.

        Only new actions are checked. A job may have more waiting actions than the limit: the actions of a lost node wait again, and
        a restart may have lowered the limit.
        """
        state = self._state
        if state.waiting_by_job[action.job] > state.limits.queue_limit and action.kind != "cpu.close":
            return Refusal(f"job {action.job} has {state.limits.queue_limit} actions waiting already", "queue_full")
        return None

    def refusal(self, action: Action, now: float) -> Refusal | None:
        """Return why `action` is refused at time `now`, however few actions wait. Return None if it is not.

        While no node of the right pool is up, the action waits.
        """
        state, pools = self._state, self._pools
        reason = pools.quotas.refusal(action)
        if reason is not None:
            return Refusal(reason, "impossible")
        if action.environment is not None:
            refused = self._environment_refusal(action, state.environments.get(action.environment), now)
            if refused is not None:
                return refused
        pool = pools.of(action) if action.environment is None else pools.cpu
        reason = pool.refusal(action) if pool is not pools.quotas else None
        return Refusal(reason, "impossible") if reason is not None else None

    def _environment_refusal(self, action: Action, environment: Environment | None, now: float) -> Refusal | None:
        if action.kind == "cpu.open":
            return Refusal(f"environment {action.environment} is open already", "bad_input") if environment is not None else None
        if environment is None:
            return self._gone_refusal(action.environment or "", now)
        if environment.job != action.job:
            return Refusal(f"environment {environment.id} is not one of job {action.job}", "bad_input")
        if environment.lost:
            return Refusal(
                f"environment {environment.id} is lost: {environment.over or environment.close_requested}",
                environment.end_cause,
                "lost",
                environment.node or "",
            )
        if environment.state == "closing":
            closing = f"environment {environment.id} is being closed: {environment.close_requested}"
            return Refusal(closing, environment.end_cause, "failed")
        return None

    def _gone_refusal(self, environment_id: str, now: float) -> Refusal:
        """Return the refusal for an environment that is gone, with its end if that is known."""
        gone = self._gone.get(environment_id)
        if gone is None:
            unknown = f"environment {environment_id} is unknown: it was never opened, or ended long ago"
            return Refusal(unknown, "environment_closed", "failed")
        if gone.state == "lost":
            return Refusal(f"environment {environment_id} is lost: {gone.reason}", loss_cause(gone.cause), "lost", gone.node)
        closed = f"environment {environment_id} was closed {max(0.0, now - gone.at):.0f} s ago: {gone.reason}"
        return Refusal(closed, gone.cause or "environment_closed", "failed")
