"""The order of actions that want cores: by priority, then by rank, then by arrival.

The rank is the expected work left of a long action and of its trajectory (`scheduler/learning/work_left.py`). All short actions have the
same rank. A policy without ranking keeps the order of arrival.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from scheduler.cpu.tuning import TUNING
from scheduler.learning.durations import Observation
from scheduler.learning.work_left import Life, WorkLeft, next_bin_s
from scheduler.model import Environment, Running, Waiting
from scheduler.model.queue import Contenders
from scheduler.model.state import State, wants_cores


class Ranking:
    """The expected work of actions on cores, and the order that follows from it."""

    def __init__(self, state: State, history: Sequence[Observation]) -> None:
        self._state = state
        self._ranks = state.rules.ranks
        self._learns = state.rules.learns
        self._work_left = WorkLeft(history if self._ranks and self._learns else ())

    def enter(self, waiting: Waiting, queue: Contenders, since: float) -> None:
        """Let an action enter a queue, as if it had wanted cores since `since`."""
        self._set_key(waiting)
        queue.enter(waiting, since)

    def renew(self, waiting: Waiting, queue: Contenders) -> None:
        """Move an action to its right place in the queue, now that more is known."""
        queue.remove(waiting)
        self._set_key(waiting)
        queue.add(waiting)

    def _set_key(self, waiting: Waiting) -> None:
        if self._ranks:
            waiting.key = (-waiting.action.priority, self.rank(waiting), waiting.seq)

    def rank(self, waiting: Waiting) -> float:
        """Return the expected work left of an action and of its trajectory, as a multiple of that of an action that begins."""
        environment = self._environment_of(waiting)
        trajectory = environment.life if environment is not None else None
        return self._work_left.rank(waiting.action.job, waiting.life, trajectory, TUNING.long)

    def note(self, running: Running, now: float) -> None:
        """Take in the work that an action has had so far."""
        if not self._learns:
            return
        job, work_s, environment = running.waiting.action.job, running.done_at(now), self._environment_of(running.waiting)
        if environment is None:
            self._work_left.note(job, running.waiting.life, work_s, None, 0.0)
            return
        before_s = environment.ended_work_s
        self._work_left.note(job, running.waiting.life, work_s, environment.life, before_s + work_s)

    def changes_in_s(self, running: Running) -> float:
        """Return the seconds until the rank of a running action changes, if it keeps its cores until then."""
        environment = self._environment_of(running.waiting)
        work_s = next_bin_s(running.waiting.life)
        if environment is not None:
            work_s = min(work_s, next_bin_s(environment.life))
        return work_s / running.speed if running.speed and self._learns else math.inf

    def ended(self, running: Running, now: float, *, counts: bool) -> None:
        """Take in that an action has ended; one that was cut short does not count as an end."""
        action = running.waiting.action
        if not (self._ranks and wants_cores(action) and action.kind != "cpu.open"):
            return
        self.note(running, now)
        if counts and self._learns:
            self._work_left.action_ended(action.job, running.waiting.life)
        environment = self._environment_of(running.waiting)
        if environment is not None:
            environment.ended_work_s += running.done_at(now)

    def trajectory_ended(self, environment: Environment) -> None:
        """Take in that a trajectory has ended; one that was cut short does not count."""
        if self._ranks and self._learns and not environment.cut_short:
            self._work_left.trajectory_ended(environment.job, environment.life)

    def resume(self, job: str, environment_id: str) -> Life:
        """Return the work that the trajectory of an environment has had by the history."""
        return self._work_left.resume(job, environment_id)

    def _environment_of(self, waiting: Waiting) -> Environment | None:
        return self._state.environments.get(waiting.action.environment or "")
