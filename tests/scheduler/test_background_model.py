"""Who gets what is idle, in simulation: the model of the background, by hand-worked cases and by what must be conserved."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.model import Grant
from scheduler.sim.progress import Live, NodeCores
from scheduler.sim.trace import TraceAction


@dataclass
class Machine:
    """A node in virtual time; when each of its actions ended."""

    capacity: int
    now: float = 0.0
    lives: list[Live] = field(default_factory=list)
    ends: dict[str, float] = field(default_factory=dict)
    calls: list[tuple[float, int, Callable[[float], None]]] = field(default_factory=list)
    planned: int = 0

    def __post_init__(self) -> None:
        self.cores = NodeCores(self.capacity, self.end, self.plan)

    def plan(self, at: float, call: Callable[[float], None]) -> None:
        self.planned += 1
        heapq.heappush(self.calls, (at, self.planned, call))

    def end(self, live: Live, now: float) -> None:
        self.cores.leave(live, now)
        self.ends[live.id] = now

    def begin(self, work_s: float, *, busy: float = 1.0, core: int | None = None) -> Live:
        """Start an action on a core of its own, or in the background."""
        name = f"a{len(self.lives)}"
        live = Live(name, TraceAction(kind="cpu.exec", work_s=work_s, cpu_s=busy * work_s), self.now, 0.0)
        core_ids = () if core is None else (core,)
        live.begin(Grant(node="n0", units=1, core_ids=core_ids, background=core is None), self.now, 0.0)
        self.lives.append(live)
        self.cores.enter(live, self.now)
        return live

    def regrant(self, live: Live, core: int | None) -> None:
        self.cores.leave(live, self.now)
        live.regrant(() if core is None else (core,), background=core is None)
        self.cores.enter(live, self.now)

    def run_until(self, until: float) -> None:
        while self.calls and self.calls[0][0] <= until:
            at, _, call = heapq.heappop(self.calls)
            self.now = max(self.now, at)
            call(self.now)
        self.now = until

    def settle(self) -> None:
        """Count what all have done until now."""
        self.cores.settle_background(self.now)
        for live in self.lives:
            if live.id not in self.ends and not live.background:
                live.settle(self.now)


NEEDS = st.sampled_from([0.0, 0.125, 0.25, 0.5, 0.75, 1.0])


@settings(max_examples=60, deadline=None)
@given(capacity=st.integers(1, 4), holders=st.lists(NEEDS, max_size=4), behind=st.lists(NEEDS, max_size=8), seconds=st.floats(0.1, 50.0))
def test_all_that_is_idle_is_used_while_somebody_can_and_no_more(
    capacity: int, holders: list[float], behind: list[float], seconds: float
) -> None:
    # Given commands that do not end, on cores and in the background, which need those for parts of their time
    machine = Machine(capacity)
    for core, busy in enumerate(holders[:capacity]):
        machine.begin(1e6, busy=busy, core=core)
    lives = [machine.begin(1e6, busy=busy) for busy in behind]
    machine.run_until(seconds)
    machine.settle()
    # Then they have got what is left, or all that they need
    idle = capacity - sum(holders[:capacity])
    got = sum(live.background_cpu_s for live in lives)
    assert got <= idle * seconds * (1 + 1e-9) + 1e-9
    assert got == pytest.approx(min(idle, sum(behind)) * seconds, rel=5e-3, abs=1e-6)
    # and who needs the same has got the same
    for live in lives:
        assert live.done_s == pytest.approx(lives[behind.index(live.busy)].done_s)
        assert live.waited_s + live.background_cpu_s == pytest.approx(seconds)


@settings(max_examples=50, deadline=None)
@given(
    capacity=st.integers(1, 3), moves=st.lists(st.tuples(st.floats(0.0, 3.0), st.integers(0, 5), NEEDS, st.floats(0.1, 5.0)), max_size=25)
)
def test_whatever_comes_and_goes_work_is_done_once(capacity: int, moves: list[tuple[float, int, float, float]]) -> None:
    # Given commands that come, get cores, and lose them, in any order
    machine = Machine(capacity)
    for after_s, pick, busy, work_s in moves:
        machine.run_until(machine.now + after_s)
        here = [live for live in machine.lives if live.id not in machine.ends]
        taken = {core for live in here for core in live.core_ids}
        free = next((core for core in range(capacity) if core not in taken), None)
        if pick < len(here):
            machine.regrant(here[pick], free if here[pick].background else None)
        else:
            machine.begin(work_s, busy=busy, core=free if pick % 2 else None)
    machine.run_until(machine.now + 1000.0)
    # Then each has done its work, all together no more than there are cores, and the times of each add up
    assert machine.ends.keys() == {live.id for live in machine.lives}
    assert sum(live.cpu_s for live in machine.lives) <= capacity * max(machine.ends.values(), default=0.0) * (1 + 1e-6) + 1e-6
    for live in machine.lives:
        assert live.done_s == pytest.approx(live.recorded.work_s, rel=1e-6)
        assert live.cpu_s == pytest.approx(live.recorded.work_s * live.busy, rel=1e-6)
        assert live.slept_s <= min(live.waited_s, live.done_s - live.cpu_s) + 1e-9
        lasted_s = machine.ends[live.id] - live.submitted_at
        assert live.unit_seconds + live.waited_s + live.background_cpu_s == pytest.approx(lasted_s, rel=1e-6)
