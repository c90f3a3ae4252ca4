"""The expected work left of an action and of its trajectory, which ranks it.

Each job has two life tables, for its actions and for its trajectories. Work is in seconds on one core. A trajectory's work is the
work of all its actions on cores. The table takes an environment for a trajectory.

| of an action  | when                                   | what the tables take in         |
|---------------|----------------------------------------|---------------------------------|
| it begins     | it gets a core, or the background      | it has reached the first bin    |
| it goes on    | `note`, whenever its work is asked for | it has reached some more bins   |
| it ends       | its worker says so                     | it has ended in its bin         |
| it is lost    | cancelled, its node lost               | nothing: it reached its bin     |

The same holds for a trajectory. It begins with its first action and ends when its environment is closed. The `history` of earlier
actions does not say which environments still stand. So all of their trajectories count as ended, until `resume` takes the end of a
continuing trajectory back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from scheduler.learning.durations import MEASURED, Observation, speed_on
from scheduler.learning.life_table import LifeTable, bin_ends_at, bin_of

ACTION_FRACTION: Final = 0.1
"""Fraction of the action's expected work left that is added to its trajectory's. The trajectory's already includes it once.

A trajectory with a long present action is longer than other trajectories of its age. So part of the action must count. Counted in
full, the action weighs twice. Where each trajectory ends in one long action, all of the long actions then pile up.
docs/scheduling.md compares 0, 0.1 and 1.
"""


MOST_JOBS: Final = 1000
"""Most jobs whose tables are kept. The oldest tables are dropped first."""


@dataclass(slots=True, eq=False)
class Life:
    """An action or a trajectory: its work so far, and its bin in the table. The bin is -1 before it begins."""

    work_s: float = 0.0
    bin: int = -1

    def advance(self, work_s: float, table: LifeTable) -> None:
        """Note work; a table counts the bins that it has reached since."""
        self.work_s = max(self.work_s, work_s)
        reached = bin_of(self.work_s)
        if reached > self.bin:
            table.reach(self.bin + 1, reached)
            self.bin = reached


class WorkLeft:
    """The life tables of all jobs."""

    def __init__(self, history: Sequence[Observation] = ()) -> None:
        self._actions: dict[str, LifeTable] = {}
        self._trajectories: dict[str, LifeTable] = {}
        self._earlier: dict[tuple[str, str], Life] = {}
        for seen in history:
            if seen.kind == MEASURED:
                self._take_history(seen)
        for (job, _), life in self._earlier.items():
            self.trajectory_ended(job, life)

    def rank(self, job: str, action: Life, trajectory: Life | None, long: float) -> float:
        """Return the expected work left of an action, as a multiple of that of its job's actions that begin a trajectory.

        It is 1 for a short action: one whose own expected work left is at most `long` times that of an action that begins. Outside an
        environment an action is its own trajectory.
        """
        actions = _table(self._actions, job)
        left_s, begins_s = actions.left_s(max(0, action.bin)), actions.left_s(0)
        if left_s <= long * begins_s:
            return 1.0
        if trajectory is None:
            return left_s / begins_s
        trajectories = _table(self._trajectories, job)
        of_trajectory_s = trajectories.left_s(max(0, trajectory.bin))
        return (of_trajectory_s + ACTION_FRACTION * left_s) / (trajectories.left_s(0) + ACTION_FRACTION * begins_s)

    def note(self, job: str, action: Life, work_s: float, trajectory: Life | None, trajectory_work_s: float) -> None:
        """Take in an action's work so far, and the work of its trajectory, including this action."""
        action.advance(work_s, _table(self._actions, job))
        if trajectory is not None:
            trajectory.advance(trajectory_work_s, _table(self._trajectories, job))

    def action_ended(self, job: str, action: Life) -> None:
        """Take in that an action has ended."""
        _table(self._actions, job).end(max(0, action.bin))

    def trajectory_ended(self, job: str, trajectory: Life) -> None:
        """Take in that a trajectory has ended. A trajectory that never began does not count."""
        if trajectory.bin >= 0:
            _table(self._trajectories, job).end(trajectory.bin)

    def resume(self, job: str, environment: str) -> Life:
        """Return the known life of a trajectory that goes on after all."""
        life = self._earlier.pop((job, environment), None)
        if life is None:
            return Life()
        _table(self._trajectories, job).end(life.bin, -1)
        return life

    def _take_history(self, seen: Observation) -> None:
        work_s = seen.execution_s * speed_on(seen.curve, seen.held_units)
        action, trajectory = Life(), None
        if seen.environment is not None:
            trajectory = self._earlier.setdefault((seen.job, seen.environment), Life())
        before_s = trajectory.work_s if trajectory is not None else 0.0
        self.note(seen.job, action, work_s, trajectory, before_s + work_s)
        self.action_ended(seen.job, action)


def next_bin_s(life: Life) -> float:
    """Return the seconds of work until a life reaches its next bin."""
    return bin_ends_at(max(0, life.bin)) - life.work_s


def _table(tables: dict[str, LifeTable], job: str) -> LifeTable:
    table = tables.get(job)
    if table is None:
        if len(tables) >= MOST_JOBS:
            del tables[next(iter(tables))]
        table = tables[job] = LifeTable()
    return table
