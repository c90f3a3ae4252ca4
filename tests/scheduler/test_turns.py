"""Turns: whoever wants cores gets them in bounded time, whatever the others are expected to need, and keeps them for a while."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.cpu.tuning import TUNING
from scheduler.model import commands

JOBS = "abc"


@dataclass
class Contention:
    """Since when an action wants cores, and how many wanted some for longer then."""

    since: float
    ahead: int


@dataclass
class Node:
    """A node on which commands run as long as they need; what each of them has had to wait for, and for how long."""

    world: Any
    cores: int
    takes_s: dict[str, float] = field(default_factory=dict)
    wants: dict[str, Contention] = field(default_factory=dict)
    had: dict[str, tuple[Contention, float]] = field(default_factory=dict)
    """Who has had cores since when, and how they had waited; those that have ended, too."""
    turn_since: dict[str, float] = field(default_factory=dict)
    waits: list[tuple[float, int]] = field(default_factory=list)
    """The seconds of each wait that is over, and how many were ahead."""
    seen: int = 0

    def __post_init__(self) -> None:
        self.world.node(cores=self.cores)
        for job in JOBS:
            self.world.open(f"e-{job}", job=job)

    def submit(self, action_id: str, takes_s: float, job: str = "a", **fields: Any) -> None:
        self.takes_s[action_id] = takes_s
        self.wants[action_id] = Contention(self.world.now, self.ahead(self.world.now))
        self.world.exec(action_id, f"e-{job}", job=job, **fields)
        self.read()

    def run_until(self, until: float) -> None:
        """Let time pass; commands end when they have had what they need."""
        while True:
            ends = [(self.end_of(running), action_id) for action_id, running in self.world.core.state.running.items()]
            end, action_id = min(ends, default=(math.inf, ""))
            wake = self.world.core.next_wake(self.world.now)
            at = min(end, math.inf if wake is None else wake)
            if at > until:
                self.world.now = until
                return
            self.world.now = max(self.world.now, at)
            if end <= at:
                self.world.finish(action_id)
            else:
                self.world.tick()
            self.read()

    def end_of(self, running: Any) -> float:
        left_s = self.takes_s[running.waiting.id] - running.done_at(self.world.now)
        return float(self.world.now + left_s / running.speed if running.speed else math.inf)

    def read(self) -> None:
        """Note who has got cores, and who has lost them."""
        now = self.world.now
        for command in self.world.out[self.seen :]:
            match command:
                case commands.Start(id=action_id, grant=grant) if grant.core_ids and action_id in self.wants:
                    self._got(action_id, now)
                case commands.Resize(id=action_id, background=False) if action_id in self.wants:
                    self._got(action_id, now)
                case commands.Resize(id=action_id, background=True):
                    got = self.turn_since.pop(action_id, None)
                    assert got is None or now >= got + TUNING.turn_s, "a turn was cut short"
                    self._lost(action_id, now)
                case _:
                    pass
        self.seen = len(self.world.out)

    def ahead(self, now: float) -> int:
        """Return how many want cores by now: those without any, and those who have not had theirs for long enough."""
        return len(self.wants) + sum(now < got + TUNING.turn_s for _, got in self.had.values())

    def _lost(self, action_id: str, now: float) -> None:
        wait, got = self.had.pop(action_id, (None, -math.inf))
        self.wants[action_id] = wait if wait is not None and now < got + TUNING.turn_s else Contention(now, self.ahead(now))

    def _got(self, action_id: str, now: float) -> None:
        wait = self.wants.pop(action_id)
        self.had[action_id] = (wait, now)
        self.waits.append((now - wait.since, wait.ahead))
        # Where there are other cores than those of turns, who waits for its turn may be handed one of them, and lose it at any moment.
        if now >= wait.since + TUNING.turn_after_s and self.cores == 1:
            self.turn_since[action_id] = now
        else:
            self.turn_since.pop(action_id, None)

    def all_waits(self) -> list[tuple[float, int]]:
        """Return all waits, those that are not over as long as they have lasted."""
        return self.waits + [(self.world.now - wait.since, wait.ahead) for wait in self.wants.values()]


def bound_s(ahead: int, at_a_time: int) -> float:
    """Return the longest that anybody waits; two looks at a node are a moment apart, which counts once for each turn."""
    turns = math.ceil((ahead + 1) / at_a_time)
    return TUNING.turn_after_s + turns * (TUNING.turn_s + TUNING.soonest_s) + TUNING.soonest_s


def stream(node: Node, seed: int, count: int, mean_s: float, *, widths: tuple[Any, ...], priorities: tuple[int, ...]) -> None:
    """Have commands of all lengths come, mostly short ones that go before all others."""
    draw = random.Random(seed)
    for number in range(count):
        work_s = draw.choice([0.05, 0.5, 0.5, 3.0, 1000.0])
        fields: dict[str, Any] = {"action_class": str(work_s), "work_s": work_s} if draw.random() < 0.7 else {}
        cores, priority, job = draw.choice(widths), draw.choice(priorities), draw.choice(JOBS)
        node.submit(f"a{number}", work_s, job, cores=cores, priority=priority, **fields)
        node.run_until(node.world.now + draw.expovariate(1 / mean_s))
    node.run_until(node.world.now + 60.0)


STREAMS = {
    "seed": st.integers(0, 100_000),
    "count": st.integers(10, 40),
    "mean_s": st.sampled_from([0.05, 0.3, 1.0]),
    "priorities": st.sampled_from([(5,), (5, 9), (0, 5, 9)]),
    "without": st.sampled_from([(), (), ("learning",), ("shares",), ("resizing",)]),
}


@settings(max_examples=20, deadline=None)
@pytest.mark.parametrize("wide", [False, True], ids=["of one core", "of up to all cores"])
@given(cores=st.sampled_from([1, 2, 8, 16, 24]), **STREAMS)
def test_who_wants_cores_gets_them_when_those_ahead_have_had_their_turn(
    world: Any, wide: bool, cores: int, without: tuple[str, ...], **fields: Any
) -> None:
    # Given commands of all lengths, jobs and priorities, more than the node can do; some may be able to use more cores than they need
    cores = max(2, cores) if wide else cores
    node = Node(world(without=without), cores)
    stream(node, widths=(1, 1, 2, cores // 2, cores, [1, 2]) if wide else (1,), **fields)
    # Then nobody has waited longer than for those that were ahead: an eighth of the cores at a time, one by one where all may be needed
    at_a_time = 1 if wide else max(1, cores // TUNING.cores_per_turn)
    assert all(waited_s <= bound_s(ahead, at_a_time) for waited_s, ahead in node.all_waits())


@pytest.mark.parametrize("came", [0.0, 0.1, 0.3, 5.7, 1e9 + 1 / 3])
def test_a_turn_comes_on_time_and_lasts_two_seconds_and_then_the_better_claim_counts_again(world: Any, came: float) -> None:
    # Given one core with a command of high priority, and one of low priority in the background
    node = Node(world(), 1)
    node.world.now = came
    node.submit("high", 1000.0, priority=9)
    node.submit("low", 1000.0, priority=0)
    node.run_until(came + TUNING.turn_after_s)
    assert node.world.background == ["high"]
    node.run_until(came + TUNING.turn_after_s + TUNING.turn_s - 0.001)
    assert node.world.background == ["high"]
    node.run_until(came + TUNING.turn_after_s + TUNING.turn_s)
    assert node.world.background == ["low"]


def test_turns_take_no_more_memory_than_there_is(world: Any) -> None:
    # Given a node with memory for one build, full of commands of higher priority
    node = Node(world(), 1)
    w = node.world
    w.lose()
    w.node("small", cores=16, memory_mb=100)
    w.open("e")
    for number in range(16):
        node.takes_s[f"a{number}"] = 1000.0
        w.exec(f"a{number}", "e", priority=9)
    for name in ("b0", "b1"):
        node.takes_s[name] = 1000.0
        w.submit(name, "build", cost={"cores": 1, "memory_mb": 60})
    node.run_until(w.now + TUNING.turn_after_s + 1.0)
    assert ("b0" in w.grants, "b1" in w.grants) == (True, False)
    assert w.core.state.nodes["small"].memory_free == 40
