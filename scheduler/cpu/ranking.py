"""The order of actions that want cores: by priority, then by expected work left.

The expected work left of the action and of its trajectory counts, in seconds on one core (`scheduler/learning/work_left.py`). A
policy without ranking keeps the order of arrival.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

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
        self._rank(waiting)
        queue.enter(waiting, since)

    def renew(self, waiting: Waiting, queue: Contenders) -> None:
        """Move an action to its right place in the queue, now that more is known."""
        queue.remove(waiting)
        self._rank(waiting)
        queue.add(waiting)

    def _rank(self, waiting: Waiting) -> None:
        if self._ranks:
            waiting.key = (-waiting.action.priority, self.left_s(waiting), waiting.seq)

    def left_s(self, waiting: Waiting) -> float:
        """Return the expected work left of an action and of its trajectory, in seconds on one core."""
        environment = self._environment_of(waiting)
        trajectory = environment.life if environment is not None else None
        return self._work_left.expected_s(waiting.action.job, waiting.life, trajectory)

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
        """Return the seconds until the expected work left of a running action changes, if it keeps its cores until then."""
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
