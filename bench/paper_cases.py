"""One simulated run of the paper's benchmark: what it is, and what is kept of it.

A case is a frozen value that travels to a process of the pool; an outcome is what comes back: the figures of
`scheduler.sim.summary`, the distribution of ACT in `QUANTILES` points, and the cores granted over time in bins.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from statistics import quantiles
from typing import Any

import numpy as np

from app.replay.traces import read_trace
from bench.workloads import WORKLOADS
from scheduler.policies import make_policy
from scheduler.sim.cluster import Cluster
from scheduler.sim.simulate import Simulation
from scheduler.sim.summary import ReplayRecord, summarise
from scheduler.sim.trace import Trace, tile

QUANTILES = 200
BINS = 300
SPREAD_S = 60.0
"""Seconds over which tiled rollouts arrive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Simulate `trajectories` rollouts of a workload, or of a trace file tiled to that many, under a policy on a cluster."""

    workload: str
    trajectories: int
    policy: str
    cluster: Cluster
    seed: int
    without: tuple[str, ...] = ()
    file: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a case came to. Seconds, microseconds where the name says `us`; `cores_granted` pairs of seconds and cores."""

    actions: int
    failed: int
    mean_act: float
    p50_act: float
    p99_act: float
    mean_queue: float
    mean_background: float
    mean_execution: float
    mean_overhead: float
    floor_act: float
    step_duration: float
    cpu_utilisation: float
    gpu_utilisation: float
    decision_us_p50: float
    decision_us_p99: float
    act_by_job: tuple[tuple[str, float], ...]
    act_quantiles: tuple[float, ...]
    cores_granted: tuple[tuple[float, float], ...]
    wall_s: float

    @property
    def over_floor(self) -> float:
        """Return mean ACT as a multiple of the mean with every action at its best amount and no queue."""
        return self.mean_act / self.floor_act


def run_case(case: Case) -> Outcome:
    """Simulate a case."""
    began = time.perf_counter()
    trace = trace_of(case.workload, case.trajectories, case.seed, case.file)
    run = Simulation(trace, make_policy(case.policy, without=case.without), case.cluster).run()
    figures: dict[str, Any] = summarise(run)
    acts = sorted(record.act_s for record in run.actions)
    return Outcome(
        **{field.name: figures[field.name] for field in fields(Outcome) if field.name in figures},
        act_by_job=tuple((job, each["mean_act"]) for job, each in figures["by_job"].items()),
        act_quantiles=(acts[0], *quantiles(acts, n=QUANTILES, method="inclusive"), acts[-1]),
        cores_granted=binned_cores(run),
        wall_s=time.perf_counter() - began,
    )


@lru_cache(maxsize=2)
def trace_of(workload: str, trajectories: int, seed: int, file: Path | None) -> Trace:
    """Return the trace of a case; the last two stay at hand, as cases come sorted by trace."""
    if file is not None:
        return tile(read_trace(file), trajectories, SPREAD_S, seed)
    return WORKLOADS[workload](trajectories, seed)


def binned_cores(run: ReplayRecord) -> tuple[tuple[float, float], ...]:
    """Return the mean of the cores granted within each of `BINS` stretches of the run."""
    if not run.cores_granted or run.last_result_s <= run.first_arrival_s:
        return ()
    edges = np.linspace(run.first_arrival_s, run.last_result_s, BINS + 1)
    times = np.array([at for at, _ in run.cores_granted])
    cores = np.array([granted for _, granted in run.cores_granted])
    times = np.append(times, max(times[-1], edges[-1]))
    core_s = np.concatenate([[0.0], np.cumsum(cores * np.diff(times))])
    means = np.diff(np.interp(edges, times, core_s)) / np.diff(edges)
    return tuple(zip((edges[:-1] - edges[0]).tolist(), means.tolist(), strict=True))
