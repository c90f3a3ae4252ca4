"""What the state machine plays with: policies and names, classes of which much is known, and a core for them."""

from __future__ import annotations

from itertools import product
from typing import Any

from hypothesis import strategies as st

from scheduler.core.core import Core
from scheduler.learning.durations import SETTLED, Observation
from scheduler.model import Limits
from scheduler.policies import PARTS, make_policy
from tangram.elasticity import Amdahl

from .ledger import QUOTAS, SERVICES

POLICIES = ("elastic", *(f"elastic without {part}" for part in PARTS), "paper", "fcfs", "fixed:2", "static:2")
JOBS = ("j1", "j2", "j3")
TRAJECTORIES = ("t1", "t2")
ENVIRONMENTS = ("e1", "e2", "e3")
NODES = ("n0", "n1", "n2")
SELDOM = st.integers(0, 5).map(lambda drawn: drawn == 5)
"""For what would leave little running if it came as often as the rest."""


WORK_S = {"instant": 0.05, "short": 0.7, "medium": 8.0, "endless": 300.0}
"""Classes of which it is known from the start how long they take."""


def history() -> list[Observation]:
    """Return so many observations of each class and job that it is settled; `serial` uses one core of what it declares."""
    seen = []
    for job, kind in product(JOBS, ("cpu.exec", "build")):
        fields: dict[str, Any] = {"job": job, "kind": kind, "service": None, "curve": Amdahl(0.9), "execution_s": 3.0}
        for name, work_s in WORK_S.items():
            taken = {"execution_s": work_s, "cpu_s": work_s}
            seen += [Observation(action_class=name, units=(1,), held_units=1.0, **{**fields, **taken})] * (SETTLED + 1)
        seen += [Observation(action_class="serial", units=(1, 2, 4), held_units=4.0, cpu_s=3.0, **fields)] * (SETTLED + 1)
    return seen


HISTORY = history()
CLASSES = st.sampled_from([None, "unknown", "serial", *WORK_S])


def make_core(policy: str, limits: Limits) -> Core:
    name, _, part = policy.partition(" without ")
    return Core(make_policy(name, without=[part] if part else []), limits=limits, services=SERVICES, quotas=QUOTAS, history=HISTORY)
