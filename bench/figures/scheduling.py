"""Figures of decisions: in simulation, and where many environments wait to be opened."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from unittest import mock

from bench.figures.registry import figure
from bench.scaling import Row, measure
from bench.tools import cpu_s
from bench.workloads import Mopd, mopd
from scheduler.core.core import Core
from scheduler.model import NodeSpec, events
from scheduler.model.stats import summary
from scheduler.policies import make_policy
from scheduler.sim.cluster import Cluster
from scheduler.sim.simulate import Simulation
from tangram.action import Action, Cost

FEW, MANY = 100, 10_000
TEACHER_CALLS, TEACHER_CELLS, TEACHER_SEEDS = 2048, 24, (77, 78)


@figure("µs")
def replay_action() -> float:
    """Return wall time of an action in a simulated replay of 640 trajectories."""
    return _replay().us_per_action


@figure("µs")
def decision() -> float:
    """Return wall time of a decision in a simulated replay of 640 trajectories, median."""
    return _replay().decision_us_p50


@figure("µs")
def decision_teachers_p99() -> float:
    """Return CPU time of a decision where 2,048 calls wait for nine teachers, 99th percentile, the better of two seeds."""
    return min(_teachers_p99(seed) for seed in TEACHER_SEEDS)


@figure("×")
def decision_crowded() -> float:
    """Return CPU time of a decision with 10,000 waiting environments, over that with 100."""
    return cpu_s(_decisions(MANY)) / cpu_s(_decisions(FEW))


@cache
def _replay() -> Row:
    return measure(640, 15, seed=1)


def _teachers_p99(seed: int) -> float:
    # The simulation times decisions by a clock that stands while others have the core.
    with mock.patch("scheduler.sim.simulate.time", SimpleNamespace(perf_counter=time.thread_time)):
        trace = mopd(TEACHER_CALLS, seed, Mopd(memory_mb=60_000))
        run = Simulation(trace, make_policy("elastic"), Cluster(cores=0, gpus=TEACHER_CELLS)).run()
    return summary(run.decision_us).p99


def _decisions(waiting: int) -> Callable[[], object]:
    """Return what makes 200 decisions while so many environments wait, none of which fits."""
    core, now = Core(make_policy("elastic")), 0.0
    core.handle(events.NodeJoined(node=NodeSpec(name="n0", pools=("cpu",), cores=8, memory_mb=20_000, labels=frozenset())), now)

    def open_one(name: str, job: str, memory_mb: int) -> None:
        action = Action(kind="cpu.open", cost=Cost.of(memory_mb=memory_mb), environment=name, job=job)
        core.handle(events.Submitted(id=f"open-{name}", action=action, submitted_at=now), now)

    open_one("there", "default", 19_000)
    for number in range(waiting):
        open_one(f"e{number}", f"j{number % 10}", 1001 + number)

    def decide() -> None:
        nonlocal now
        for _ in range(200):
            now += 0.01
            core.handle(events.Tick(), now)

    return decide
