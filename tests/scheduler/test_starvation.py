"""No job starves: what one has waiting gets its part, however much another one has."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Coming:
    """An action that comes `after_s` seconds after the one before it and takes `work_s` seconds."""

    after_s: float
    name: str
    work_s: float
    declared: bool
    priority: int
    job: str


@dataclass
class Stream:
    """A stream of actions on a node, driven to its last end; when each came and began."""

    world: Any
    came: dict[str, float] = field(default_factory=dict)
    began: dict[str, float] = field(default_factory=dict)
    what: dict[str, Coming] = field(default_factory=dict)

    def run(self, coming: list[Coming]) -> None:
        at = 0.0
        for number, one in enumerate(coming):
            at += one.after_s
            self.end_until(at)
            self.world.now = at
            action_id = f"a{number}"
            self.came[action_id], self.what[action_id] = at, one
            fields = {"work_s": one.work_s} if one.declared else {}
            self.world.run(action_id, 1, job=one.job, action_class=one.name, priority=one.priority, **fields)
        self.end_until(math.inf)

    def end_until(self, at: float) -> None:
        """End what ends before `at`, one after the other."""
        state = self.world.core.state
        while state.running:
            action_id, running = min(state.running.items(), key=lambda entry: self.end_of(*entry))
            end = self.end_of(action_id, running)
            if end > at:
                return
            self.world.now, self.began[action_id] = end, running.granted_at
            self.world.finish(action_id, execution_s=self.what[action_id].work_s)

    def end_of(self, action_id: str, running: Any) -> float:
        return float(running.granted_at) + self.what[action_id].work_s

    def overtakings(self) -> list[tuple[str, str]]:
        """Return who started before whom of the same job that had come earlier."""
        place = {action_id: number for number, action_id in enumerate(self.world.started)}
        ids = list(self.came)
        return [
            (later, earlier)
            for number, earlier in enumerate(ids)
            for later in ids[number + 1 :]
            if place[later] < place[earlier] and self.what[later].job == self.what[earlier].job
        ]


def test_a_job_beyond_its_share_starves_no_more_than_its_share(world: Any) -> None:
    # Given two jobs of which one always has as much waiting as the node can do, and the other came with a hundred
    w = world()
    w.node(cores=2)
    stream = Stream(w)
    many = [Coming(0.0, "short", 1.0, True, 5, "a")] * 100
    steady = [Coming(0.5, "short", 1.0, True, 5, "b")] * 200

    stream.run(many + steady)

    # Then the hundred have had half of the node while the other was there
    half_time = [action_id for action_id in w.started if stream.began[action_id] <= 100.0]
    assert 80 <= sum(stream.what[action_id].job == "a" for action_id in half_time) <= 120
