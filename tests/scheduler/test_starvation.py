"""Nothing waits for ever: within a job an action is overtaken only by what comes in a bounded time after it."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

WINDOW_S = 60.0
CLASSES = {"short": 0.5, "medium": 4.0, "long": 300.0, "mixed": 0.0}


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


@st.composite
def streams(draw: st.DrawFn) -> list[Coming]:
    """Draw a stream of actions of all lengths that mostly comes faster than a few cores can serve it."""
    numbers = random.Random(draw(st.integers(0, 10_000)))
    mean_s, priorities = draw(st.sampled_from([0.2, 2.0, 20.0])), draw(st.sampled_from([(5,), (5,), (4, 5, 6)]))
    coming = []
    for _ in range(draw(st.integers(2, 60))):
        name = numbers.choice(list(CLASSES))
        work_s = numbers.lognormvariate(math.log(CLASSES[name] or numbers.choice([0.2, 100.0])), 0.3)
        after_s = numbers.expovariate(1 / mean_s)
        coming.append(Coming(after_s, name, work_s, numbers.random() < 0.5, numbers.choice(priorities), numbers.choice("ab")))
    return coming


@settings(max_examples=100, deadline=None)
@given(coming=streams(), cores=st.integers(1, 3), without=st.sampled_from([(), ("learning",), ("shares",), ("fractions",)]))
def test_an_action_is_overtaken_only_by_those_that_come_within_the_window(
    world: Any, coming: list[Coming], cores: int, without: tuple[str, ...]
) -> None:
    # Given a stream of actions of all lengths, known, unknown and wrongly known, on too few cores
    w = world(without=without, window_s=WINDOW_S)
    w.node(cores=cores)
    stream = Stream(w)

    stream.run(coming)

    # Then each was overtaken by those alone that came at most one window later, and one more for each class of priority
    assert len(w.started) == len(coming)
    for later, earlier in stream.overtakings():
        above = stream.what[later].priority - stream.what[earlier].priority
        assert stream.came[later] - stream.came[earlier] <= WINDOW_S * (1 + above) + 1e-9


@given(coming=streams(), cores=st.integers(1, 3))
def test_without_short_first_and_in_one_priority_nobody_of_a_job_is_overtaken(world: Any, coming: list[Coming], cores: int) -> None:
    w = world(without=["short-first"], window_s=WINDOW_S)
    w.node(cores=cores)
    stream = Stream(w)

    stream.run([one for one in coming if one.priority == 5] or coming[:1])

    assert stream.overtakings() == []


def test_in_an_endless_stream_of_short_actions_a_long_one_starts_within_the_window(world: Any) -> None:
    # Given one core, which short actions keep busy, and a long one among them
    w = world(window_s=WINDOW_S)
    w.node(cores=1)
    stream = Stream(w)
    short = Coming(0.5, "short", 0.5, True, 5, "a")
    long = Coming(0.0, "long", 300.0, True, 5, "a")

    stream.run([replace(short, after_s=0.0)] * 4 + [long] + [short] * 400)

    # Then it starts a window later, not after all of them
    assert 0.5 * WINDOW_S <= stream.began["a4"] - stream.came["a4"] <= WINDOW_S + 1.0


@pytest.mark.parametrize("tail_first", [True, False])
def test_a_trajectory_under_way_is_put_forward_by_a_part_of_its_age_and_by_all_of_it_tail_first(world: Any, tail_first: bool) -> None:
    # Given an environment that has stood for a window, one that is fresh, and a full node
    w = world(window_s=WINDOW_S, tail_first=tail_first)
    w.node(cores=1)
    w.open("old")
    w.now = WINDOW_S
    w.open("fresh")
    w.exec("busy", "fresh")

    # When actions of the old one come half a window, and more than a window, after those of the fresh one
    w.exec("fresh-1", "fresh")
    w.now += 0.5 * WINDOW_S
    w.exec("old-1", "old")
    w.now += 0.6 * WINDOW_S
    w.exec("old-2", "old")
    for _ in range(4):
        w.finish(next(iter(w.grants)))

    # Then what came within its age goes first, if all of that counts
    order = [name for name in w.started if name[-2:] in ("-1", "-2")]
    assert order == (["old-1", "fresh-1", "old-2"] if tail_first else ["fresh-1", "old-1", "old-2"])


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
